"""Buffer communication hooks: as with torch's class, before and after forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import phalanx as px
from phalanx.testing import run_ranks

TorchDDP = torch.nn.parallel.DistributedDataParallel


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def _sum_floats(state: list[str], buffers: dict[str, torch.Tensor]) -> list[Any]:
    """Not what would happen without a hook: floating buffers are added up, the others left alone."""
    state += [name for name, buffer in buffers.items() if buffer.is_floating_point()]
    works = [dist.all_reduce(b, async_op=True) for b in buffers.values() if b.is_floating_point()]
    for work in works:
        work.wait()  # futures are waited for when backward is over, and before that forward changes the buffers
    return [work.get_future() for work in works]


def _train(cls: type[TorchDDP], where: Location) -> tuple[dict[str, torch.Tensor], list[str]]:
    called: list[str] = []
    model = cls(_net(), process_group=dist.new_group())
    model._register_buffer_comm_hook(called, _sum_floats, where)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    return {name: value.clone() for name, value in model.module.state_dict().items()}, called


def _compare(where: Location) -> None:
    theirs, their_calls = _train(TorchDDP, where)
    ours, our_calls = _train(px.DistributedDataParallel, where)
    assert our_calls == their_calls and len(our_calls) >= 6
    plain = _net().state_dict()
    assert not torch.equal(ours["1.running_mean"], plain["1.running_mean"])
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("where", list(Location), ids=lambda where: where.name.lower())
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_does_what_it_does_with_torch(world_size: int, backend: str, where: Location) -> None:
    run_ranks(_compare, world_size, where, backend=backend)
