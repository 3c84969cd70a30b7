"""Twenty steps of five models: the same bits as torch's DDP on two ranks, and in float64 the same as one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from tests.parity.models import CASES, STEPS, Wrap, relative_error, train, train_alone
from torch import nn

import phalanx as px
from phalanx.testing import ranks


def torch_ddp(module: nn.Module, *, unused: bool) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=unused)


def replicated_in_small_buckets(module: nn.Module) -> nn.Module:
    return px.replicate(module, bucket_bytes=2048, first_bucket_bytes=256)


# How a model becomes data-parallel. Another face is another line.
WRAPS: dict[str, Wrap] = {
    "replicate": px.replicate,
    "replicate, small buckets": replicated_in_small_buckets,
    "ddp": lambda module: px.DistributedDataParallel(module, find_unused_parameters=True),
    "ddp, views": lambda module: px.DistributedDataParallel(
        module, find_unused_parameters=True, gradient_as_bucket_view=True
    ),
}

wraps = pytest.mark.parametrize("wrap", list(WRAPS))
cases = pytest.mark.parametrize("name", list(CASES))


@wraps
@cases
@ranks(2, timeout_s=50)
def test_the_same_bits_as_torchs_ddp(name: str, wrap: str) -> None:
    case = CASES[name]
    theirs = train(case, functools.partial(torch_ddp, unused=case.unused), dist.get_rank(), torch.float32)
    mine = train(case, WRAPS[wrap], dist.get_rank(), torch.float32)
    assert mine.keys() == theirs.keys()
    parameters = [key for key, _ in case.model().named_parameters()]
    different = [key for key in parameters if not torch.equal(mine[key], theirs[key])]
    assert not different
    untouched = case.model().state_dict()
    changed = [key for key in parameters if not torch.equal(mine[key], untouched[key])]
    expected = [key for key in parameters if not key.startswith("branches.3")]  # nobody uses that one
    assert changed == expected


@wraps
@cases
@pytest.mark.parametrize("world_size", [2, 3])
def test_float64_equals_one_process(name: str, wrap: str, world_size: int) -> None:
    @ranks(world_size, timeout_s=50)
    def body(name: str, wrap: str) -> None:
        case, size = CASES[name], dist.get_world_size()
        mine = train(case, WRAPS[wrap], dist.get_rank(), torch.float64)
        alone = train_alone(case, size, torch.float64)
        if wrap.startswith("ddp"):  # torch's contract: buffers are those of rank 0 from the next forward on, not before
            mine = {key: mine[key] for key, _ in case.model().named_parameters()}
        assert relative_error(mine, alone) < 1e-10
        wrong = train_alone(case, size, torch.float64, steps=STEPS - 1)
        assert relative_error(mine, wrong) > 1e-6  # a step less would show

    body(name, wrap)
