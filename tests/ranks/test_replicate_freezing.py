"""Freezing and unfreezing parameters during training: ranks must agree, and buckets are laid out anew."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, flush_engine, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx import events
from phalanx.errors import MismatchError
from phalanx.testing import ranks


def set_frozen(models: tuple[nn.Module, ...], layer: int, frozen: bool) -> None:
    for model in models:
        model[layer].requires_grad_(not frozen)  # type: ignore[index]


@ranks(2)
def test_freeze_and_unfreeze_in_training() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    schedule = {2: (0, True), 4: (2, True), 6: (0, False), 8: (2, False), 9: (4, True), 10: (4, False)}
    for step in range(13):
        if step in schedule:
            set_frozen((model, reference), *schedule[step])
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_frozen_at_first_and_unfrozen_before_the_order_was_agreed() -> None:
    rank = dist.get_rank()
    model, reference = mlp(), mlp()
    set_frozen((model, reference), 0, True)
    px.replicate(model, **SMALL)
    for step in range(5):
        if step == 1:
            set_frozen((model, reference), 0, False)
        if step == 2:
            set_frozen((model, reference), 2, True)
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_frozen_in_the_very_first_step() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    set_frozen((model, reference), 0, True)
    for step in range(4):
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_the_step_that_unfreezes_averages_by_weight_too() -> None:
    rank = dist.get_rank()
    model, reference = mlp(), mlp()
    set_frozen((model, reference), 0, True)
    px.replicate(model, **SMALL)
    for step in range(3):
        if step == 1:
            set_frozen((model, reference), 0, False)
        model.zero_grad()
        px.weight(model, [1.0, 3.0][rank])
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step, weights=[1.0, 3.0]))


@ranks(2)
def test_unfreezing_a_sparse_embedding() -> None:
    rank = dist.get_rank()

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))

    model, reference = net(), net()
    set_frozen((model, reference), 0, True)
    px.replicate(model)
    for step in range(4):
        if step == 1:
            set_frozen((model, reference), 0, False)
        loss = lambda m, r, s: m(torch.arange(4) + s + r).square().sum()
        model.zero_grad()
        loss(model, rank, step).backward()
        expected = average_gradients(reference, loss, step)
        for name, parameter in model.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad.to_dense(), expected[name].to_dense())


@ranks(2)
def test_what_was_kept_for_a_parameter_is_reduced_though_it_is_frozen_by_then() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    with px.no_sync(model):
        plain_loss(model, rank, 0).backward()
    set_frozen((model,), 0, True)
    plain_loss(model, rank, 1).backward()
    for r in range(2):
        (plain_loss(reference, r, 0) / 2).backward()
    set_frozen((reference,), 0, True)
    for r in range(2):
        (plain_loss(reference, r, 1) / 2).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@ranks(2)
def test_buckets_are_laid_out_anew() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    for step in range(2):
        plain_loss(model, rank, step).backward()
    set_frozen((model,), 0, True)
    with events.recorded() as seen:
        plain_loss(model, rank, 2).backward()
        plain_loss(model, rank, 3).backward()
    (planned,) = [event for event in seen if isinstance(event, events.BucketsPlanned)]
    assert "frozen" in planned.reason
    arrived = [event.parameter for event in seen if isinstance(event, events.GradientReady) and event.step == 4]
    assert sorted(arrived) == ["2.bias", "2.weight", "4.bias", "4.weight"]


@pytest.mark.parametrize("frozen", [True, False])
@ranks(3, timeout_s=20)
def test_ranks_that_disagree_all_get_an_error_that_names_the_parameter(frozen: bool) -> None:
    rank = dist.get_rank()
    model = mlp()
    set_frozen((model,), 2, not frozen)
    px.replicate(model, **SMALL)
    plain_loss(model, rank, 0).backward()
    if rank == 1:
        set_frozen((model,), 2, frozen)
    with pytest.raises(MismatchError, match=r"2\.weight.*frozen"):
        plain_loss(model, rank, 1).backward()
    with pytest.raises(MismatchError):  # and again: there is no way on from here, on any rank
        plain_loss(model, rank, 2).backward()
    flush_engine()


@ranks(2)
def test_everything_frozen_and_back() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    plain_loss(model, rank, 0).backward()
    model.requires_grad_(False)
    assert not model(batch(rank)).requires_grad
    model.requires_grad_(True)
    model.zero_grad()
    plain_loss(model, rank, 1).backward()
    assert_gradients(model, average_gradients(reference, plain_loss, 1))


@ranks(2)
def test_unfrozen_in_a_step_that_leaves_another_unused() -> None:
    """Who is unused is told by the list of before, though there is a longer one by then."""
    rank = dist.get_rank()
    model, reference = (nn.ModuleList(nn.Linear(3, 3).double() for _ in range(4)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    for one in (model, reference):
        one[0].requires_grad_(False)
    px.replicate(model)
    reference.load_state_dict(model.state_dict())

    def loss(of: nn.ModuleList, r: int, which: list[int]) -> torch.Tensor:
        x = torch.full((2, 3), 1.0 + r, dtype=torch.float64)
        for index in which:
            x = torch.tanh(of[index](x))
        return x.square().sum()

    for step in range(8):
        which = [0, 1, 2] if step == 4 else [0, 1, 2, 3]
        for one in (model, reference):
            one[0].requires_grad_(step >= 4)
            one.zero_grad()
        loss(model, rank, which).backward()
        (sum(loss(reference, r, which) for r in range(2)) / 2).backward()
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{name} in step {step}"
            if other.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)
