"""Buckets are laid out anew after the first step, in the order in which gradients arrived on rank 0."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, batch, check_steps
from torch import nn

import phalanx as px
from phalanx import events
from phalanx.api.replica import replica_of
from phalanx.errors import PeerFailedError
from phalanx.testing import ranks


class Crossed(nn.Module):
    """Layers registered in another order than they are used in, and used in another order on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x


def order_of(rank: int) -> list[int]:
    return [2, 0, 3, 1] if rank == 0 else [1, 3, 0, 2]


def crossed_loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
    return m(batch(rank, step), order_of(rank)).square().sum()


@ranks(3)
def test_the_order_is_rank_0s_on_every_rank() -> None:
    rank = dist.get_rank()
    model = px.replicate(Crossed(), **SMALL)
    reducer = replica_of(model).reducer
    before = [bucket.spec.parameters for bucket in reducer.buckets]
    with events.recorded() as seen:
        for step in range(4):
            model.zero_grad()
            crossed_loss(model, rank, step).backward()
    planned = [event for event in seen if isinstance(event, events.BucketsPlanned)]
    assert len(planned) == 1  # once
    assert planned[0].step == 2
    after = [bucket.spec.parameters for bucket in reducer.buckets]
    assert after != before
    flat = [index // 2 for bucket in after for index in bucket]  # weight and bias of a layer have neighbouring indices
    assert list(dict.fromkeys(flat)) == [1, 3, 0, 2]
    layouts: list[object] = [None] * 3
    dist.all_gather_object(layouts, after)
    assert all(layout == after for layout in layouts)


@ranks(2)
def test_gradients_are_right_before_and_after() -> None:
    check_steps(px.replicate(Crossed(), **SMALL), Crossed(), crossed_loss, steps=5)


@ranks(2)
def test_what_rank_0_did_not_use_comes_last_and_is_still_averaged() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(batch(rank, step), [0, 3] if rank == 0 else [0, 1, 2]).square().sum()

    check_steps(px.replicate(Crossed(), **SMALL), Crossed(), loss)


@ranks(2)
def test_kept_gradients_survive_the_new_layout() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(Crossed(), **SMALL), Crossed()
    for step in range(3):  # no zero_grad: the first step's averages lie in the old buckets
        crossed_loss(model, rank, step).backward()
        for r in range(2):
            (crossed_loss(reference, r, step) / 2).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
            buckets = replica_of(model).reducer.buckets
            places = {bucket.buffer.untyped_storage().data_ptr() for bucket in buckets}
            assert mine.grad.untyped_storage().data_ptr() in places


@ranks(2)
def test_a_first_step_that_failed_teaches_nothing() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(Crossed(), **SMALL), Crossed()
    handle = model.layers[2].weight.register_hook(_fails) if rank == 1 else None
    with pytest.raises(ArithmeticError if rank == 1 else PeerFailedError):
        crossed_loss(model, rank, 0).backward()
    if handle is not None:
        handle.remove()
    check_steps(model, reference, crossed_loss)


def _fails(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("this hook fails")
