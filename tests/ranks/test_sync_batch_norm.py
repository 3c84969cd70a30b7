"""`SyncBatchNorm` against one process on the concatenated batch, forward and backward, on both backends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.normalized import batch, check_against_one_process
from torch import nn

import phalanx as px
from phalanx.testing import ranks, run_ranks

SHAPES = [(3,), (3, 5), (3, 4, 4), (3, 2, 4, 4)]


def _layer(dtype: torch.dtype = torch.float64, **options: object) -> px.SyncBatchNorm:
    torch.manual_seed(0)
    layer = px.SyncBatchNorm(3, dtype=dtype, **options)
    if layer.affine:
        with torch.no_grad():
            layer.weight.uniform_(0.5, 2)
            if layer.bias is not None:
                layer.bias.uniform_(-1, 1)
    return layer


def _exact() -> None:
    world_size = dist.get_world_size()
    for shape in SHAPES:
        for sizes in ([4] * world_size, [2 + 3 * rank for rank in range(world_size)]):
            check_against_one_process(_layer(), sizes, shape, torch.float64)
        check_against_one_process(_layer(torch.float32), [3] * world_size, shape, torch.float32)
    for shape, memory_format in (((3, 4, 5), torch.channels_last), ((3, 2, 4, 5), torch.channels_last_3d)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            layer = _layer(torch.float32 if dtype == torch.bfloat16 else dtype)
            check_against_one_process(layer, [2] * world_size, shape, dtype, memory_format=memory_format)


def _corners() -> None:
    world_size = dist.get_world_size()
    one_each, last_only = [1] * world_size, [0] * (world_size - 1) + [4]
    first_only = [5] + [0] * (world_size - 1)
    for sizes in (one_each, last_only, first_only):
        for shape in ((3,), (3, 4, 4)):
            check_against_one_process(_layer(), sizes, shape, torch.float64)
    for options in (
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"momentum": None},
        {"momentum": 1.0, "eps": 0.1},
    ):
        check_against_one_process(_layer(**options), [3] * world_size, (3, 4), torch.float64, steps=3)
    for dtype in (torch.float16, torch.bfloat16):
        for state in (torch.float32, dtype):
            check_against_one_process(_layer(state), [4] * world_size, (3, 4, 4), dtype, steps=1)


def _numbers_and_groups() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Far from zero: the mean of squares less the square of the mean has no correct digit left here.
    layer = px.SyncBatchNorm(1)
    layer(1e4 + torch.randn(500, 1, generator=torch.Generator().manual_seed(rank)))
    assert 0.09 < layer.running_var.item() - 0.9 < 0.11
    # A group of some ranks; the rank outside normalises alone.
    some = dist.new_group([0, 1])
    layer = _layer(process_group=some)
    if rank < 2:
        check_against_one_process(layer, [2, 5], (3, 4), torch.float64, ranks=[0, 1])
    else:
        layer.process_group = some  # new_group's answer to a rank outside
        x = batch(rank, 6, (3, 4), torch.float64)
        torch.testing.assert_close(layer(x).mean((0, 2)), layer.bias.detach())
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    check_against_one_process(_layer(process_group=alone), [4], (3, 4), torch.float64, ranks=[rank])


BODIES = (_exact, _corners, _numbers_and_groups)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
def test_it_equals_one_process(body: object, world_size: int, backend: str) -> None:
    run_ranks(body, world_size, backend=backend)


@ranks(2)
def test_gradients_of_some_only() -> None:
    x = batch(dist.get_rank(), 4, (3, 4), torch.float64)
    weights = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)
    full = _layer()
    whole = x.clone().requires_grad_()
    (full(whole) * weights).sum().backward()
    for names in (("input",), ("weight",), ("bias",), ("input", "bias"), ("weight", "bias"), ("input", "weight")):
        layer = _layer()
        mine = x.clone().requires_grad_("input" in names)
        for name in ("weight", "bias"):
            getattr(layer, name).requires_grad_(name in names)
        (layer(mine) * weights).sum().backward()
        for name, got, wanted in (
            ("input", mine.grad, whole.grad),
            ("weight", layer.weight.grad, full.weight.grad),
            ("bias", layer.bias.grad, full.bias.grad),
        ):
            if name in names:
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
            else:
                assert got is None
    # One rank's input needs a gradient and the other's does not: both still take part in the backward.
    layer = _layer()
    mine = x.clone().requires_grad_(dist.get_rank() == 0)
    (layer(mine) * weights).sum().backward()
    if dist.get_rank() == 0:
        torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-10, atol=1e-10)


@ranks(2, backend="phalanx")
def test_twice_in_one_forward() -> None:
    rank = dist.get_rank()
    layer, reference = _layer(), nn.BatchNorm1d(3, dtype=torch.float64)
    reference.load_state_dict(layer.state_dict())
    inputs = [batch(r, 4, (3, 2), torch.float64) for r in range(2)]
    whole = torch.cat(inputs).requires_grad_()
    reference(torch.tanh(reference(whole)).square()).pow(3).sum().backward()
    x = inputs[rank].requires_grad_()
    layer(torch.tanh(layer(x)).square()).pow(3).sum().backward()
    torch.testing.assert_close(x.grad, whole.grad.split(4)[rank], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer.running_var, reference.running_var, rtol=1e-10, atol=1e-10)
    assert layer.num_batches_tracked.item() == 2


@ranks(2)
def test_a_collective_each_way_and_none_in_eval() -> None:
    layer = _layer(torch.float32)
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).sum().backward()  # the first use compares the layers, through the store
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    assert sorted(names) == ["gloo:all_gather", "gloo:all_reduce"]
    if dist.get_rank() == 0:
        layer.eval()
        expected = nn.functional.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps
        )
        assert torch.equal(layer(x), expected)
        untracked = px.SyncBatchNorm(3, track_running_stats=False).eval()
        torch.testing.assert_close(untracked(x).mean(0), torch.zeros(3), rtol=0, atol=1e-6)


@ranks(2)
def test_autocast_and_in_place_after_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), px.SyncBatchNorm(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(12, 2)
    )
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model[:2](torch.randn(4, 2, 4, 4))
        output = model(torch.randn(4, 2, 4, 4))
    assert hidden.dtype == output.dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.float32
    output.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
