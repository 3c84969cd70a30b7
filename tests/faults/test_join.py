"""A rank that breaks off inside `px.join`: the others learn who and why, whatever they were at."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, flush_engine, mlp
from tests.ranks.uneven import shares
from torch import nn

import phalanx as px
from phalanx.errors import PeerFailedError, PeerLostError, PhalanxError, ReducerStateError
from phalanx.testing import ranks, run_ranks

UNFINISHED = "a collective that one rank never comes to stays with the worker thread until the process ends"


def _train(model: nn.Module, batches: object, *, fail_at: int = -1) -> None:
    for number, batch in enumerate(batches):  # type: ignore[arg-type]
        if number == fail_at:
            raise KeyError("a bad sample")
        model.zero_grad()
        model(batch).square().mean().backward()


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 1, 4]])
@pytest.mark.parametrize("form", ["over", "block", "own loop"])
def test_an_exception_on_one_rank(form: str, counts: list[int], backend: str) -> None:
    """Rank 2 raises before its third batch: while all have data, and while rank 1 shadows."""
    run_ranks(_one_raises, 3, form, counts, backend=backend, allow_leaks=UNFINISHED if backend == "phalanx" else "")


def _one_raises(form: str, counts: list[int]) -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp().double(), **SMALL)
    data = shares(counts)[rank]
    fail_at = 2 if rank == 2 else -1

    def train() -> None:
        if form == "over":
            _train(model, px.join(model).over(data), fail_at=fail_at)
            return
        with px.join(model) as joined:
            _train(model, data if form == "own loop" else joined.over(data), fail_at=fail_at)

    if rank == 2:
        with pytest.raises(KeyError, match="a bad sample"):
            train()
    else:
        reason = "left px.join in batch" if form == "over" else "a bad sample"
        with pytest.raises(PhalanxError, match=reason) as caught:
            train()
        assert isinstance(caught.value, PeerFailedError)
        assert caught.value.failed_ranks == (2,)
    flush_engine()
    dist.barrier()


@pytest.mark.parametrize("first", [True, False])
@ranks(2)
def test_a_loader_that_raises_on_one_rank(first: bool) -> None:
    model = px.replicate(mlp().double(), **SMALL)

    def loader() -> Iterator[torch.Tensor]:
        if dist.get_rank() == 0:
            if not first:
                yield from shares([2, 0])[0]
            raise OSError("the disk is gone")
        yield from shares([0, 5])[1]

    with pytest.raises((OSError, PhalanxError, ValueError), match="the disk is gone"):
        _train(model, px.join(model).over(loader()))


@ranks(2)
def test_break_on_one_rank_alone_is_told_to_the_others() -> None:
    model = px.replicate(mlp().double(), **SMALL)

    def train() -> None:
        for batch in px.join(model).over(shares([4, 4])[dist.get_rank()]):
            model(batch).square().mean().backward()
            if dist.get_rank() == 0:
                break

    if dist.get_rank() == 0:
        train()
    else:
        with pytest.raises(
            PeerFailedError, match=r"rank 0 failed: it left px\.join in batch 1 of its loop: its loop ended"
        ):
            train()


@ranks(2, expect_exit={1: -signal.SIGKILL})
def test_a_rank_that_dies_while_another_shadows() -> None:
    model = px.replicate(mlp().double(), **SMALL)

    def train() -> None:
        for number, batch in enumerate(px.join(model).over(shares([1, 4])[dist.get_rank()])):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            model(batch).square().mean().backward()

    with pytest.raises(PeerLostError, match="rank 1"):
        train()


@pytest.mark.parametrize("joined", [False, True])
@ranks(2)
def test_a_batch_of_no_samples(joined: bool) -> None:
    """On one rank it counts for nothing; on all it is an error on all, and training goes on."""
    rank = dist.get_rank()
    model = px.replicate(mlp().double(), **SMALL)
    empty, full = torch.zeros(0, 6, dtype=torch.float64), shares([1, 1])[1][0]
    batches = [full if rank else empty, empty, full]
    for number, batch in enumerate(px.join(model).over(batches) if joined else batches):
        model.zero_grad()
        px.weight(model, len(batch), reduction="sum")
        loss = model(batch).square().sum()
        if number == 1:
            with pytest.raises(ReducerStateError, match="the weights of all ranks add up to 0"):
                loss.backward()
            continue
        loss.backward()
        reference = mlp().double()
        reference(full).square().sum().div(len(full)).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
