"""`px.join` that stops on every rank together, or says on every rank who ran out first."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, equal_on_all_ranks, flush_engine, mlp
from tests.ranks.uneven import CLOSE, assert_same_state, shares, train_alone
from torch import nn

import phalanx as px
from phalanx.errors import MismatchError, OutOfDataError, PeerFailedError
from phalanx.testing import ranks, run_ranks

SGD = lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
WORLDS = pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (2, "phalanx"), (3, "gloo"), (3, "phalanx")])
COUNTS = {2: ([3, 5], [4, 2], [3, 3], [0, 2]), 3: ([5, 3, 4], [2, 2, 4], [2, 0, 1], [0, 0, 0])}


@WORLDS
def test_all_stop_after_the_same_batch(world_size: int, backend: str) -> None:
    run_ranks(_stops, world_size, backend=backend)


def _stops() -> None:
    for counts in COUNTS[dist.get_world_size()]:
        data = shares(counts)
        model = px.replicate(mlp().double(), **SMALL)
        optimizer = SGD(model)
        num_batches = 0
        for batch in px.join(model, when_out="stop").over(data[dist.get_rank()]):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            num_batches += 1
        assert num_batches == min(counts) == px.step_stats(model).steps
        if num_batches:
            cut = [share[:num_batches] for share in data]
            assert_same_state(model, train_alone(mlp().double(), cut, SGD), **CLOSE)


@WORLDS
def test_the_error_names_who_ran_out_first_and_when(world_size: int, backend: str) -> None:
    run_ranks(_errors, world_size, backend=backend)


def _errors() -> None:
    for counts in COUNTS[dist.get_world_size()]:
        model = px.replicate(mlp().double(), **SMALL)
        joined = px.join(model, when_out="error")
        batches = joined.over(shares(counts)[dist.get_rank()])
        num_batches = 0

        def train(batches: object = batches, model: nn.Module = model) -> None:
            nonlocal num_batches
            for batch in batches:  # type: ignore[attr-defined]
                model.zero_grad()
                model(batch).square().mean().backward()
                num_batches += 1

        first = [rank for rank, count in enumerate(counts) if count == min(counts)]
        if len(first) == len(counts):
            train()
        else:
            with pytest.raises(OutOfDataError, match=f"ran out of data first, after {min(counts)} batches") as caught:
                train()
            assert caught.value.out_ranks == tuple(first)
        assert num_batches == min(counts)
        # All ranks are at the same point, and train on.
        model.zero_grad()
        model(torch.full((2, 6), float(dist.get_rank()), dtype=torch.float64)).square().mean().backward()
        assert all(equal_on_all_ranks(parameter.grad) for parameter in model.parameters())


@ranks(2)
def test_error_in_a_block_around_a_loop_of_ones_own() -> None:
    model = px.replicate(mlp().double(), **SMALL)
    num_batches = 0

    def train() -> None:
        nonlocal num_batches
        with px.join(model, when_out="error"):
            for batch in shares([5, 2])[dist.get_rank()]:
                model.zero_grad()
                model(batch).square().mean().backward()
                num_batches += 1

    with pytest.raises(OutOfDataError, match="rank 1 ran out of data first"):
        train()
    assert num_batches == 2
    flush_engine()


@pytest.mark.parametrize("when_out", ["stop", "error"])
@ranks(2)
def test_batches_without_a_step_are_agreed_on_too(when_out: str) -> None:
    """Under accumulation the end may come in a batch that reduces nothing."""
    model = px.replicate(mlp().double(), **SMALL)
    num_batches = 0
    failed = False
    with px.accumulate(model, 4):
        try:
            for batch in px.join(model, when_out=when_out).over(shares([6, 9])[dist.get_rank()]):
                model(batch).square().mean().backward()
                num_batches += 1
        except OutOfDataError as error:
            failed = error.out_ranks == (0,)
    assert num_batches == 6
    assert failed == (when_out == "error")
    assert all(equal_on_all_ranks(parameter.grad) for parameter in model.parameters())


@ranks(2)
def test_collectives_of_the_loop_are_fine_where_all_stop_together() -> None:
    model = px.replicate(mlp().double(), **SMALL)
    totals = []
    for batch in px.join(model, when_out="stop").over(shares([2, 4])[dist.get_rank()]):
        loss = model(batch).square().mean()
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        totals.append(total)
    assert len(totals) == 2


# -- what it cannot do, said on every rank ------------------------------------------------------------------------------


@ranks(2)
def test_a_collective_that_cannot_be_shadowed() -> None:
    model = px.replicate(mlp().double(), **SMALL)
    losses = 0

    def train() -> None:
        nonlocal losses
        for batch in px.join(model).over(shares([2, 4])[dist.get_rank()]):
            loss = model(batch).square().mean()
            loss.backward()
            dist.all_reduce(loss.detach().clone())
            losses += 1

    kind = PeerFailedError if dist.get_rank() == 0 else MismatchError
    with pytest.raises(kind, match=r"would not come to this allreduce"):
        train()
    assert losses == 2
    dist.all_reduce(torch.ones(1))  # the guard is gone, and the group is whole


class Talks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp().double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0).detach()
        dist.all_reduce(mean)
        return self.layer(x - mean)


@pytest.mark.parametrize("counts", [[2, 4], [0, 1]])
@pytest.mark.parametrize("own_loop", [False, True])
@ranks(2)
def test_a_forward_that_runs_a_collective_of_its_own(own_loop: bool, counts: list[int]) -> None:
    model = px.replicate(Talks(), **SMALL)
    data = shares(counts)[dist.get_rank()]

    def train() -> None:
        with px.join(model) as joined:
            for batch in data if own_loop else joined.over(data):
                model(batch).square().mean().backward()

    with pytest.raises((MismatchError, PeerFailedError), match="would not come to this allreduce"):
        train()


@ranks(2)
def test_a_module_that_was_not_named() -> None:
    model, other = px.replicate(mlp().double(), **SMALL), px.replicate(mlp(1).double(), **SMALL)

    def train() -> None:
        for batch in px.join(model).over(shares([1, 3])[dist.get_rank()]):
            other(batch).square().mean().backward()
            model(batch).square().mean().backward()

    with pytest.raises(
        (MismatchError, PeerFailedError), match=r"would not come to this .* on group 'phalanx.replicate'"
    ):
        train()
    flush_engine()


@ranks(2)
def test_sync_batch_norm_of_torch_cannot_be_shadowed_but_may_stop() -> None:
    net = lambda: nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4))
    model = px.replicate(net())
    with pytest.raises(ValueError, match=r'1 is a SyncBatchNorm of torch.* when_out="stop"'):
        next(iter(px.join(model).over([torch.ones(2, 6)])))
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        px.join(model).__enter__()
    model.eval()
    for batch in px.join(model).over([torch.ones(2, 6)] * (1 + dist.get_rank())):
        model(batch).sum().backward()


@ranks(2)
def test_a_problem_of_one_rank_is_told_on_all() -> None:
    model = px.replicate(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4)))
    if dist.get_rank() == 0:
        model.eval()
    with pytest.raises((ValueError, MismatchError), match="SyncBatchNorm"):
        next(iter(px.join(model).over([torch.ones(2, 6)])))
    when_out = "stop" if dist.get_rank() else "error"
    with pytest.raises(MismatchError, match="ranks joined differently"):
        next(iter(px.join(model, when_out=when_out).over([torch.ones(2, 6)])))


@ranks(2)
def test_stop_needs_our_loop() -> None:
    model = px.replicate(mlp().double(), **SMALL)

    def train() -> None:
        with px.join(model, when_out="stop"):
            for batch in shares([1, 2])[dist.get_rank()]:
                model(batch).square().mean().backward()

    with pytest.raises(ValueError, match=r"\.over\(loader\)"):
        train()
    flush_engine()


@ranks(2)
def test_ranks_that_reduce_different_modules_are_told() -> None:
    """In a led step each rank says what it is about to do."""
    one, two = px.replicate(mlp().double(), **SMALL), px.replicate(mlp(1).double(), **SMALL)

    def train() -> None:
        with px.join(one, two):
            batch = torch.ones(2, 6, dtype=torch.float64)
            (one if dist.get_rank() else two)(batch).sum().backward()

    with pytest.raises(MismatchError, match="rank 0 reduces Sequential, rank 1 reduces Sequential"):
        train()
    flush_engine()


@ranks(1)
def test_bad_arguments_and_a_world_of_one() -> None:
    model = px.replicate(mlp().double())
    with pytest.raises(ValueError, match="when_out must be one of shadow, stop, error; got 'wait'"):
        px.join(model, when_out="wait")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not replicated"):
        px.join(mlp())
    with pytest.raises(TypeError, match=r"join\(\) of its own"):
        px.join(px.DistributedDataParallel(mlp()))
    with pytest.raises(TypeError, match="state_dict"):
        px.join(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice"):
        px.join(model, model)
    for when_out in ("shadow", "stop", "error"):
        batches = list(px.join(model, when_out=when_out).over(shares([3])[0]))
        assert len(batches) == 3
    with px.join(model):
        model(shares([1])[0][0]).sum().backward()
