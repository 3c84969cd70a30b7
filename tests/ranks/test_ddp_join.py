"""`DistributedDataParallel.join` and torch's `Join`: bit for bit what torch's own class makes of uneven inputs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Branches, Pair, images
from tests.ranks.replicas import batch, equal_on_all_ranks, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.testing import ranks, run_ranks

COUNTS = {2: ([3, 6], [0, 4], [5, 2]), 3: ([2, 5, 4], [0, 0, 3], [4, 1, 4]), 4: ([2, 0, 5, 3],)}


def _square(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().mean()


def _images(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(images(rank, step)).square().mean()


def _branch(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step), use=(rank % 2,)).square().mean()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module] = mlp
    loss: Callable[[nn.Module, int, int], torch.Tensor] = _square
    options: dict[str, Any] = field(default_factory=dict)
    join: dict[str, Any] = field(default_factory=dict)
    hook: Any = None
    sync_every: int = 1
    set_to_none: bool = True
    momentum: float = 0.9


def _close() -> dict[str, float]:
    """Two ranks add up to the same bits; more add up in an order that is the backend's."""
    return {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 2 else {"rtol": 1e-4, "atol": 1e-6}


def _power_state() -> Any:
    return powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2, warm_start=True, random_seed=7
    )


BY_ACTIVE = {"divide_by_initial_world_size": False}
CASES = {
    "plain": Case(),
    "divided by those who have data": Case(join=BY_ACTIVE),
    "views": Case(options={"gradient_as_bucket_view": True}, join=BY_ACTIVE),
    "views that stay": Case(options={"gradient_as_bucket_view": True}, set_to_none=False),
    "buffers": Case(BatchNormNet, _images, {"bucket_cap_mb": 0.001}),
    "buffers left alone": Case(BatchNormNet, _images, {"broadcast_buffers": False}),
    "unused": Case(Branches, _branch, {"find_unused_parameters": True}, BY_ACTIVE, momentum=0),
    "static": Case(options={"static_graph": True}, join=BY_ACTIVE),
    "no_sync": Case(sync_every=2),
    "no_sync in views": Case(sync_every=3, options={"gradient_as_bucket_view": True}, set_to_none=False),
    "hook": Case(hook=(None, default_hooks.allreduce_hook), join=BY_ACTIVE),
    "half": Case(hook=(None, default_hooks.fp16_compress_hook)),
    "off": Case(join={"enable": False}),
}


def _both(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """Ours on a group of the backend, torch's on Gloo: its reducer asks a work of the join for what Python's have not.

    And without its static graph, which aborts when a rank shadows the first step; the numbers are the same.
    """
    ours = px.DistributedDataParallel(make(), process_group=dist.new_group(), **options)
    options.pop("static_graph", None)
    return ours, TorchDDP(make(), process_group=dist.new_group(backend="gloo"), **options)


def _train(model: Any, case: Case, counts: list[int]) -> list[Any]:
    """Train in a join, then on without one; returns what every step left behind."""
    rank = dist.get_rank()
    if case.hook is not None:
        state, hook = case.hook
        model.register_comm_hook(state() if state else None, hook)
    if not case.join.get("enable", True):
        counts = [min(counts)] * len(counts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=case.momentum)
    seen: list[Any] = []

    def step(number: int, *, sync: bool) -> None:
        with nullcontext() if sync else model.no_sync():
            case.loss(model, rank, number).backward()
        seen.extend(None if p.grad is None else p.grad.detach().clone() for p in model.parameters())
        if sync:
            optimizer.step()
            optimizer.zero_grad(set_to_none=case.set_to_none)

    with model.join(**case.join):
        for number in range(counts[rank]):
            step(number, sync=number % case.sync_every == case.sync_every - 1)
    seen.extend(None if p.grad is None else p.grad.detach().clone() for p in model.parameters())
    seen.extend(value.clone() for value in model.state_dict().values())
    if case.hook is None:
        for number in range(20, 22):  # every rank again, and what was learnt of the graph still holds
            step(number, sync=True)
    return seen


IN_EVERY_WORLD = ("plain", "views", "buffers", "unused", "no_sync")
RUNS = [
    *((name, 2, "gloo") for name in CASES),
    *((name, 3, "phalanx") for name in CASES),
    *((name, 2, "phalanx") for name in IN_EVERY_WORLD),
    *((name, 3, "gloo") for name in IN_EVERY_WORLD),
    ("buffers", 4, "gloo"),
]


@pytest.mark.parametrize(("name", "world_size", "backend"), RUNS)
def test_uneven_inputs_as_with_torch(name: str, world_size: int, backend: str) -> None:
    run_ranks(_as_with_torch, world_size, name, backend=backend)


def _as_with_torch(name: str) -> None:
    case = CASES[name]
    for counts in COUNTS[dist.get_world_size()]:
        ours, theirs = _both(case.make, **case.options)
        mine, others = _train(ours, case, counts), _train(theirs, case, counts)
        for value, other in zip(mine, others, strict=True):
            if value is None:
                # What no rank with data uses gets none here, and zeros with torch while some rank shadows.
                assert other is None or (name == "unused" and not other.any()), "torch has a gradient here"
            else:
                torch.testing.assert_close(value, other, **_close())
        if case.join.get("enable", True):
            assert ours._authoritative_rank == theirs._authoritative_rank
            assert ours._get_ddp_logging_data()["join_uneven_inputs"]


@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (3, "phalanx")])
def test_throw_on_early_termination(world_size: int, backend: str) -> None:
    run_ranks(_throws, world_size, backend=backend)


class Talks(nn.Module):
    """A collective of its own in forward, which only this mode allows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = x.detach().mean(0)
        dist.all_reduce(shift)
        return self.layer(x - shift)


def _throws() -> None:
    rank = dist.get_rank()
    for make, loss in ((mlp, _square), (BatchNormNet, _images), (Talks, _square)):
        pair = Pair(*_both(make))
        for model in pair.both():
            steps = 0

            def train(model: Any = model, loss: Any = loss) -> None:
                nonlocal steps
                with model.join(throw_on_early_termination=True):
                    for number in range(2 if rank == 0 else 5):
                        loss(model, rank, number).backward()
                        with torch.no_grad():
                            for parameter in model.parameters():
                                parameter -= 0.1 * parameter.grad
                        steps += 1

            message = "Rank 0 exhausted all inputs" if rank == 0 else "Detected at least one rank that exhausted inputs"
            with pytest.raises(RuntimeError, match=message):
                train()
            assert steps == 2
        pair.compare_gradients(**_close())
        pair.compare_state(**_close())


@pytest.mark.parametrize(("world_size", "backend"), [(2, "phalanx"), (3, "gloo"), (3, "phalanx")])
def test_several_joinables_with_zero_redundancy(world_size: int, backend: str) -> None:
    run_ranks(_several, world_size, backend=backend)


def _several() -> None:
    rank = dist.get_rank()
    for counts in COUNTS[dist.get_world_size()]:
        results = []
        for kind, group in ((px.DistributedDataParallel, None), (TorchDDP, dist.new_group(backend="gloo"))):
            one, two = kind(mlp(), process_group=group), kind(BatchNormNet(), process_group=group)
            optimizers = [
                ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.05, momentum=0.9)
                for model in (one, two)
            ]
            with Join([one, two, *optimizers], divide_by_initial_world_size=False):
                for number in range(counts[rank]):
                    _square(one, rank, number).backward()
                    _images(two, rank, number).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            results.append([*one.state_dict().values(), *two.state_dict().values()])
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other, **_close())


@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (3, "phalanx")])
def test_power_sgd_inside(world_size: int, backend: str) -> None:
    """What it draws at random depends on the order in a bucket, so no bits to compare; that ranks end alike, shows it."""
    run_ranks(_power, world_size, backend=backend)


def _power() -> None:
    for counts in COUNTS[dist.get_world_size()]:
        model = px.DistributedDataParallel(mlp())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        _train(model, Case(hook=(_power_state, powerSGD_hook.powerSGD_hook)), counts)
        for parameter, start in zip(model.parameters(), before, strict=True):
            assert equal_on_all_ranks(parameter)
            assert parameter.isfinite().all()
            assert not torch.equal(parameter, start)


@ranks(2)
def test_an_exception_inside_is_the_users_own() -> None:
    model = px.DistributedDataParallel(mlp())

    def train() -> None:
        with model.join():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
