"""Reports that are read when the next step begins, as on a GPU: here the group is told to be one that streams wait for.

What a rank has to tell then reaches the others a step later. Everything else must be as ever.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Pair, square_loss
from tests.ranks.replicas import (
    SMALL,
    assert_gradients,
    average_gradients,
    batch,
    check_steps,
    equal_on_all_ranks,
    flush_engine,
    mlp,
    plain_loss,
)
from torch import nn

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.comm.c10d import C10dGroup
from phalanx.errors import PeerFailedError, PeerLostError, PhalanxError, ReducerStateError
from phalanx.testing import run_ranks

everywhere = pytest.mark.parametrize("where", ["gloo 2", "gloo 3", "phalanx 2", "phalanx 3"])


def in_ranks(where: str, *bodies: Callable[[], None]) -> None:
    backend, world_size = where.split()
    run_ranks(deferring, int(world_size), bodies, backend=backend, timeout_s=50)


def deferring(bodies: Sequence[Callable[[], None]]) -> None:
    C10dGroup.waits_on_streams = lambda self, device: True  # type: ignore[method-assign]
    for body in bodies:
        body()


def defers(model: nn.Module) -> bool:
    """Whether the last step's report is still to be read."""
    engine = getattr(model, "_engine", None) or replica_of(model).reducer
    return engine._reports.awaited is not None


def branches(count: int = 4) -> nn.Module:
    from tests.ranks.test_replicate_unused import Branches

    return Branches(count)


# -- alike on all ranks ------------------------------------------------------------------------------------------------


def regular() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
        pair = Pair.of(mlp, **options)
        # Of more than two ranks ours are added up in another order where the group averages.
        close = {} if dist.get_world_size() == 2 else {"rtol": 1e-5, "atol": 1e-6}
        pair.train(square_loss, steps=8, **close)
        assert defers(pair.ours)
    model = px.replicate(mlp(), **SMALL)
    check_steps(model, mlp(), plain_loss, steps=8)
    assert defers(model)


def unused() -> None:
    last = dist.get_world_size() - 1

    def by_one(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        which = [0, 1, 2] if rank == last and step in (2, 3, 7) else [0, 1, 2, 3]
        return m(batch(rank, step), which).square().sum()

    def by_all(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(batch(rank, step), [0, 1, 2, 3] if step % 3 else [0, 2]).square().sum()

    def by_another_each_time(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(batch(rank, step), [(rank + step) % 4, (rank + step + 1) % 4]).square().sum()

    for loss in (by_one, by_all, by_another_each_time):
        check_steps(px.replicate(branches(), **SMALL), branches(), loss, steps=10)


def accumulated() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(6):
        model.zero_grad()
        with px.accumulate(model, 3):
            for part in range(3):
                plain_loss(model, rank, 10 * step + part).backward()

        def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
            return sum((plain_loss(m, rank, 10 * step + part) for part in range(3)), torch.zeros(()))

        assert_gradients(model, average_gradients(reference, loss, step))


def frozen() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(12):
        for m in (model, reference):
            m[2].requires_grad_(not 4 <= step < 8)
            m.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))


def weighted() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(8):
        model.zero_grad()
        weights = [1.0 + (r + step) % 3 for r in range(size)]
        if step % 3:
            px.weight(model, weights[rank])
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step, weights=weights if step % 3 else None))


def joined() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    check_steps(model, reference, plain_loss, steps=4)  # reports were deferred before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    steps_of = [4 + 2 * r for r in range(size)]
    with px.join(model):
        for step in range(steps_of[rank]):
            optimizer.zero_grad()
            plain_loss(model, rank, step).backward()
            optimizer.step()
    for step in range(max(steps_of)):
        weights = [1.0 if step < steps_of[r] else 0.0 for r in range(size)]
        average_gradients(reference, plain_loss, step, weights=weights)
        plain.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    check_steps(model, reference, plain_loss, steps=4)  # and are again


def late() -> None:
    """From some step on a layer comes twice: known in time, as nothing leaves before it is known how often it comes."""
    model, reference = px.replicate(branches(), **SMALL), branches()

    def twice(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        once = m(batch(rank, step), [0, 1, 2, 3]).square().sum()
        return once + m.branches[3](m.common(batch(rank, step)) * once).sum()

    check_steps(model, reference, lambda m, r, s: m(batch(r, s), [0, 1, 2, 3]).square().sum(), steps=5)
    check_steps(model, reference, twice, steps=5)


@everywhere
def test_steps_that_are_alike_on_all_ranks(where: str) -> None:
    in_ranks(where, regular, unused, accumulated, frozen, weighted, joined, late)


# -- what only one rank knows ------------------------------------------------------------------------------------------


def fail(_: torch.Tensor) -> None:
    raise OSError("on purpose")


def failing_loss(model: nn.Sequential, rank: int, step: int) -> torch.Tensor:
    hidden = model[:3](batch(rank, step))
    hidden.register_hook(fail)
    return model[3:](hidden).square().sum()


class Remembers(nn.Module):
    """A buffer that is another on every rank until it is synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().mean().expand(3).clone()
        return x


def with_buffer() -> nn.Sequential:
    return nn.Sequential(*mlp(), Remembers())


def one_raises(failing: int, make: Callable[[], nn.Sequential], at: int) -> None:
    """The others have finished that step, and hear of it in the next; of the very first one at once."""
    rank = dist.get_rank()
    model, reference = px.replicate(make(), **SMALL), make()
    check_steps(model, reference, plain_loss, steps=at)
    told: list[tuple[int, type[Exception]]] = []
    said = ""
    for step in range(at, at + 6):
        model.zero_grad()
        bad = step == at and rank == failing
        try:
            (failing_loss if bad else plain_loss)(model, rank, step).backward()
        except (OSError, PhalanxError) as error:
            told.append((step, type(error)))
            said = str(error)
            flush_engine()
        if step != at:  # also where it was told of the step before, a step is that of all ranks
            assert_gradients(model, average_gradients(reference, plain_loss, step))
            assert all(equal_on_all_ranks(buffer) for buffer in model.buffers())
    learnt = at if at == 0 else at + 1
    assert told == ([(at, OSError)] if rank == failing else [(learnt, PeerFailedError)])
    before = f" of step {at + 1}, the step before" if at else ""
    assert rank == failing or f"rank {failing} raised in its backward pass{before}" in said


def raises_in_the_last_step() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    check_steps(model, mlp(), plain_loss, steps=5)
    model.zero_grad()
    if rank == 1:
        with pytest.raises(OSError, match="on purpose"):
            failing_loss(model, rank, 5).backward()
        flush_engine()
    else:
        plain_loss(model, rank, 5).backward()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    px.shutdown()
    assert len(said) == (rank != 1)
    assert rank == 1 or f"rank {rank}, after its last step: rank 1 raised in its backward pass of step 6" in said[0]


def evaluating() -> None:
    """A rank that reads at once knows that no module is in training mode, and the others do not."""
    last = dist.get_world_size() - 1

    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        hidden = m[1](m[0](batch(rank, step), [0, 1] if rank == last and step == 6 else [0, 1, 2, 3]))
        return hidden.square().sum()

    model, reference = (nn.Sequential(branches(), Remembers()).eval() for _ in range(2))
    check_steps(px.replicate(model, **SMALL), reference, loss, steps=10)


def changed_on_one() -> None:
    """What is no error: the others compare in their next step, when they have done all of this one."""
    model, reference = px.replicate(with_buffer(), **SMALL), with_buffer()
    check_steps(model, reference, plain_loss, steps=5)
    if dist.get_rank() == 0:
        model.add_module("more", nn.Identity())
    check_steps(model, reference, plain_loss, steps=5)
    assert equal_on_all_ranks(model[5].last)


def weight_on_one(make: Callable[[], nn.Sequential]) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(make(), **SMALL), make()
    check_steps(model, reference, plain_loss, steps=5)
    told = []
    for step in range(5, 11):
        model.zero_grad()
        if step == 6 and rank == 0:
            px.weight(model, 2.0)
        try:
            plain_loss(model, rank, step).backward()
        except ReducerStateError as error:
            told.append((step, "ranks [0] gave a weight" in str(error)))
            flush_engine()
        if step != 6:
            assert_gradients(model, average_gradients(reference, plain_loss, step))
    assert told == [(6 if rank == 0 else 7, True)]


def frozen_on_one() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    check_steps(model, mlp(), plain_loss, steps=5)
    told = []
    if rank == 0:
        model[2].requires_grad_(False)
    for step in range(5, 8):
        model.zero_grad()
        try:
            plain_loss(model, rank, step).backward()
        except PhalanxError:
            told.append(step)
            flush_engine()
            break
    # Not an error where it may be that the ranks agree to differ; what must not be is one that waits.
    everyone = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor([float(bool(told))]))
    assert len({bool(one.item()) for one in everyone}) == 1


@everywhere
def test_what_one_rank_alone_has_to_tell(where: str) -> None:
    in_ranks(where, functools.partial(weight_on_one, mlp), evaluating, changed_on_one, frozen_on_one)


@everywhere
@pytest.mark.parametrize("make", [mlp, with_buffer])
def test_one_raises(where: str, make: Callable[[], nn.Sequential]) -> None:
    in_ranks(where, *(functools.partial(one_raises, failing, make, at) for failing in (0, 1) for at in (0, 1, 6)))


@everywhere
def test_what_was_said_of_the_last_step_is_logged(where: str) -> None:
    in_ranks(where, raises_in_the_last_step)


@everywhere
def test_one_gives_a_weight_and_buffers_travel(where: str) -> None:
    in_ranks(where, functools.partial(weight_on_one, with_buffer))


# -- a device that waits in vain ---------------------------------------------------------------------------------------


def left_alone(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The last rank goes when the others have queued a step that it has no part in; here the copy of its report is late."""
    C10dGroup.waits_on_streams = lambda self, device: True  # type: ignore[method-assign]
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = wrap(mlp())
    for step in range(5):
        plain_loss(model, rank, step).backward()
    dist.barrier()
    if rank == last:
        os._exit(3)
    reducer = getattr(model, "_engine", None) or replica_of(model).reducer
    late = reducer._reports.queued
    late._mark.clear()
    group, until = reducer.group, time.monotonic() + 15
    while not group.is_given_up and time.monotonic() < until:
        time.sleep(0.01)  # within CUDA, on a GPU
    assert group.is_given_up
    late._numbers.zero_()  # the device goes on
    for _ in range(2):
        with pytest.raises(PeerLostError, match=f"rank {last} died") as caught:
            plain_loss(model, rank, 5).backward()
        assert "Go back to a checkpoint" in " ".join(caught.value.__notes__)
    with pytest.raises(PeerLostError):
        group.all_reduce(torch.ones(1))


@everywhere
@pytest.mark.parametrize("wrap", [px.replicate, px.DistributedDataParallel])
def test_a_rank_is_gone_while_the_device_waits_for_it(where: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    backend, size = where.split()
    world_size = int(size)
    gone = {world_size - 1: 3}
    run_ranks(
        left_alone,
        world_size,
        wrap,
        backend=backend,
        expect_exit=gone,
        allow_leaks="a rank leaves its group",
        timeout_s=40,
    )


def lets_go(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """A closed group is not looked after any more: the harness says if the thread stays."""
    C10dGroup.waits_on_streams = lambda self, device: True  # type: ignore[method-assign]
    model = wrap(mlp())
    for step in range(5):
        plain_loss(model, dist.get_rank(), step).backward()
    assert "phalanx-lookout" in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("wrap", [px.replicate, px.DistributedDataParallel])
def test_a_group_that_is_closed_leaves_no_thread(wrap: Callable[[nn.Module], nn.Module]) -> None:
    run_ranks(lets_go, 2, wrap, backend="gloo", timeout_s=30)


def alone() -> None:
    C10dGroup.waits_on_streams = lambda self, device: True  # type: ignore[method-assign]
    model = px.replicate(mlp())
    for step in range(3):
        plain_loss(model, 0, step).backward()
    assert "phalanx-lookout" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_has_no_others_looks_at_none() -> None:
    run_ranks(alone, 1, backend="gloo", timeout_s=30)
