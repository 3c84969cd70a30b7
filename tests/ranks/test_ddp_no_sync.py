"""Keeping gradients local: `no_sync`, its flag set by hand, decided at forward, and what the next step reduces."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches, Pair, square_loss
from tests.ranks.replicas import batch, gradients, mlp
from torch import nn

import phalanx as px
from phalanx.testing import ranks


def alone(loss_rank: int, *steps: int) -> dict[str, torch.Tensor | None]:
    """Gradients of one rank's losses, without any averaging."""
    model = mlp()
    for step in steps:
        square_loss(model, loss_rank, step).backward()
    return gradients(model)


def assert_equal(model: nn.Module, expected: dict[str, torch.Tensor | None]) -> None:
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_gradients_stay_local_and_the_next_step_reduces_all(view: bool) -> None:
    rank = dist.get_rank()
    pair = Pair.of(mlp, gradient_as_bucket_view=view)
    for model in pair.both():
        for step in range(3):
            with model.no_sync():
                square_loss(model, rank, step).backward()
    assert_equal(pair.ours.module, alone(rank, 0, 1, 2))
    for model in pair.both():
        square_loss(model, rank, 3).backward()
    pair.compare_gradients()


@ranks(2)
def test_the_flag_set_by_hand_is_no_sync() -> None:
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for model in pair.both():
        assert model.require_backward_grad_sync is True
        model.require_backward_grad_sync = False
        square_loss(model, rank, 0).backward()
        model.require_backward_grad_sync = True
    assert_equal(pair.ours.module, alone(rank, 0))
    for model in pair.both():
        square_loss(model, rank, 1).backward()
    pair.compare_gradients()


@ranks(2)
def test_it_is_decided_at_forward() -> None:
    """A backward outside of the block, whose forward was inside, stays local; the other way round it synchronises."""
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for model in pair.both():
        with model.no_sync():
            loss = square_loss(model, rank, 0)
        loss.backward()
    assert_equal(pair.ours.module, alone(rank, 0))
    for model in pair.both():
        model.zero_grad()
        loss = square_loss(model, rank, 1)
        with model.no_sync():
            loss.backward()
    pair.compare_gradients()
    mine = pair.ours.module[0].weight.grad
    assert not torch.equal(mine, alone(rank, 1)["0.weight"])


@ranks(2)
def test_blocks_nest_and_survive_exceptions() -> None:
    model = px.DistributedDataParallel(mlp())
    with model.no_sync():
        with model.no_sync():
            assert not model.require_backward_grad_sync
        assert not model.require_backward_grad_sync
    assert model.require_backward_grad_sync
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    assert model.require_backward_grad_sync


@ranks(2)
def test_ranks_may_accumulate_differently() -> None:
    """No collective runs inside the block, so ranks need not take the same number of local steps."""
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for model in pair.both():
        with model.no_sync():
            for step in range(1 + rank):
                square_loss(model, rank, step).backward()
        square_loss(model, rank, 9).backward()
    pair.compare_gradients()


@ranks(2)
def test_what_only_an_earlier_micro_batch_used_is_reduced() -> None:
    """As with torch: unused in the pass that synchronises, used in one that did not."""
    rank = dist.get_rank()
    pair = Pair.of(Branches, find_unused_parameters=True)
    for step in range(3):
        for model in pair.both():
            model.zero_grad()
            with model.no_sync():
                model(batch(rank, step), (0, 1)).square().sum().backward()
            model(batch(rank, 50 + step), (rank,)).square().sum().backward()
        pair.compare_gradients(f"in step {step}")


@ranks(2)
def test_buffers_are_not_broadcast_after_a_local_forward() -> None:
    """torch skips the broadcast of the forward that follows one inside the block."""
    rank = dist.get_rank()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    torch.manual_seed(0)
    weights = make().state_dict()

    def loaded() -> nn.Module:
        model = make()
        model.load_state_dict(weights)
        return model

    pair = Pair.of(loaded)
    for step in range(4):
        for model in pair.both():
            if step % 2 == 0:
                with model.no_sync():
                    model(batch(rank, step)).sum().backward()
            else:
                model(batch(rank, step)).sum().backward()
        pair.compare_state(f"in step {step}")


@ranks(2)
def test_a_forward_under_no_grad_changes_nothing() -> None:
    """Validation between a forward and its backward: the backward still synchronises."""
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for model in pair.both():
        loss = square_loss(model, rank, 0)
        with torch.no_grad():
            model(batch(rank, 7))
        loss.backward()
    pair.compare_gradients()
    assert not torch.equal(pair.ours.module[0].weight.grad, alone(rank, 0)["0.weight"])
