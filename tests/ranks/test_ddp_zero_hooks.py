"""torch's hooks that overlap ZeroRedundancyOptimizer with backward, on our class, also with uneven inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import batch, equal_on_all_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.testing import run_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@dataclass(frozen=True)
class Case:
    wrap: Callable[..., Any] = hook_with_zero_step
    shard: bool = False
    static: bool = False
    views: bool = False
    optimizer: Any = torch.optim.SGD

    @property
    def num_skipped(self) -> int:
        """Steps in which the hooks only learn the buckets, by torch's documentation."""
        return 3 if self.static else 2


CASES = {
    "after": Case(),
    "after, sharded, static": Case(shard=True, static=True),
    "after, Adam, views": Case(optimizer=torch.optim.Adam, views=True),
    "interleaved": Case(hook_with_zero_step_interleaved),
    "interleaved, sharded, static": Case(hook_with_zero_step_interleaved, shard=True, static=True),
}
COUNTS = {2: ([5, 5], [3, 6], [0, 5], [4, 1]), 3: ([5, 5, 5], [2, 5, 0], [4, 1, 4])}


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _overlapped(kind: Any, case: Case, counts: Sequence[int], *, group: Any = None, both: bool = False) -> nn.Module:
    options = {"bucket_cap_mb": 0.0005, "static_graph": case.static, "gradient_as_bucket_view": case.views}
    model = kind(_net(), process_group=group, **options)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), case.optimizer, process_group=group, overlap_with_ddp=True, lr=0.05
    )
    hook = case.wrap(default_hooks.allreduce_hook, model, zero, shard_buckets=case.shard)
    model.register_comm_hook(group, hook)
    with Join([model, zero] if both else [model]):
        for step in range(counts[dist.get_rank()]):
            model.zero_grad()
            model(batch(dist.get_rank(), step)).square().mean().backward()  # and no step of the optimizer's
    return model


def _alone(case: Case, counts: Sequence[int]) -> nn.Module:
    model = _net()
    optimizer = case.optimizer(model.parameters(), lr=0.05)
    for step in range(max(counts)):
        optimizer.zero_grad()
        for rank, count in enumerate(counts):
            if step < count:
                (model(batch(rank, step)).square().mean() / len(counts)).backward()
        if step >= case.num_skipped:
            optimizer.step()
    return model


def _same(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
        assert equal_on_all_ranks(mine)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_steps_in_the_hook_equal_one_process(name: str, world_size: int) -> None:
    run_ranks(_as_one_process, world_size, name, backend="phalanx")


def _as_one_process(name: str) -> None:
    case = CASES[name]
    for counts in COUNTS[dist.get_world_size()]:
        _same(_overlapped(px.DistributedDataParallel, case, counts), _alone(case, counts))


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_with_torch(world_size: int) -> None:
    """Of torch's own class only what works on the CPU: steps after backward, and ranks that run out after the third."""
    run_ranks(_as_with_torch, world_size, backend="phalanx")


def _as_with_torch() -> None:
    size = dist.get_world_size()
    for name, counts in (("after", [4] * size), ("after, sharded, static", [5] * size), ("after", [3, 5, 4][:size])):
        case = CASES[name]
        theirs = _overlapped(TorchDDP, case, counts, group=dist.new_group(), both=True)
        _same(_overlapped(px.DistributedDataParallel, case, counts, group=dist.new_group(), both=True), theirs)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gloo(world_size: int) -> None:
    """The hooks refuse a group that is called Gloo, whatever the class; where they do not know, it works."""
    run_ranks(_gloo, world_size, backend="gloo")


def _gloo() -> None:
    for case in (Case(), Case(hook_with_zero_step_interleaved)):
        with pytest.raises(RuntimeError, match="Gloo backend using Overlapping DDP with ZeRO may meet hangs"):
            _overlapped(px.DistributedDataParallel, case, [1] * dist.get_world_size())
        for counts in COUNTS[dist.get_world_size()][:2]:
            group = dist.new_group(backend="cpu:gloo")
            _same(_overlapped(px.DistributedDataParallel, case, counts, group=group), _alone(case, counts))
