"""What cannot be wrapped: an error on every rank within seconds, which says what is wrong and where."""

from __future__ import annotations

import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import mlp, plain_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import phalanx as px
from phalanx.errors import MismatchError, PhalanxError
from phalanx.testing import ranks


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class Differs:
    """Pairs of models that differ in one thing, and what the error says of it on the first and on the second."""

    MODELS = {
        "names": (lambda: named(a=nn.Linear(2, 2)), lambda: named(b=nn.Linear(2, 2)), "a.weight", "b.weight"),
        "shapes": (lambda: nn.Linear(2, 3), lambda: nn.Linear(2, 4), "[3, 2]", "[4, 2]"),
        "dtypes": (lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).double(), "torch.float32", "torch.float64"),
        "counts": (
            lambda: named(a=nn.Linear(2, 2)),
            lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
            "2 tensors here, 4 there",
            "4 tensors here, 2 there",
        ),
        "frozen": (
            lambda: named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
            lambda: named(a=nn.Linear(2, 2).requires_grad_(False), b=nn.Linear(2, 2)),
            "4 tensors here, 2 there",
            "2 tensors here, 4 there",
        ),
    }


@pytest.mark.parametrize("what", Differs.MODELS)
@ranks(3, timeout_s=20)
def test_models_that_differ(what: str) -> None:
    """Rank 2 has another model than 0 and 1; every rank names the first difference and both sides."""
    rank = dist.get_rank()
    first, second, here, there = Differs.MODELS[what]
    began = time.monotonic()
    with pytest.raises(MismatchError, match="DDP expects same model across all ranks") as caught:
        px.DistributedDataParallel(first() if rank < 2 else second())
    assert time.monotonic() - began < 10
    text = str(caught.value)
    assert f"rank {rank} (here)" in text and f"rank {2 if rank < 2 else 0} (there)" in text
    assert (here if rank < 2 else there) in text and ("tensors here" in text or (there if rank < 2 else here) in text)


def _alone() -> dist.ProcessGroup:
    """A group of this rank only: to replicate on it needs nobody else."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def _ignoring_all() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weight", "bias"])
    return model


PROBLEMS = {
    "ignored": (_ignoring_all, "doesn't have any parameter that requires a gradient"),
    "no gradient": (_frozen, "doesn't have any parameter that requires a gradient"),
    "no parameter": (nn.Tanh, "doesn't have any parameter that requires a gradient"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    "replicated": (lambda: px.replicate(mlp(), process_group=_alone()), "is already replicated"),
    "lazy": (lambda: nn.LazyLinear(2), "uninitialized parameters can't be used with `DistributedDataParallel`"),
}


@pytest.mark.parametrize("what", PROBLEMS)
@ranks(2)
def test_a_problem_on_all_ranks(what: str) -> None:
    make, text = PROBLEMS[what]
    with pytest.raises((RuntimeError, ValueError), match=text):
        px.DistributedDataParallel(make())
    px.DistributedDataParallel(mlp())  # and the group is as good as before


@pytest.mark.parametrize("what", PROBLEMS)
@ranks(3, timeout_s=20)
def test_a_problem_on_one_rank_alone_is_told_to_the_others(what: str) -> None:
    rank = dist.get_rank()
    make, text = PROBLEMS[what]
    began = time.monotonic()
    if rank == 1:
        with pytest.raises((RuntimeError, ValueError), match=text):
            px.DistributedDataParallel(make())
    else:
        with pytest.raises(PhalanxError, match=f"rank 1.*{text}"):
            px.DistributedDataParallel(nn.Linear(2, 2))
    assert time.monotonic() - began < 10
    model = px.DistributedDataParallel(mlp())  # told once, not for ever
    plain_loss(model, rank, 0).backward()


@ranks(1, backend=None)
def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        px.DistributedDataParallel(mlp())


@ranks(2)
def test_a_group_that_this_rank_is_not_in() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises((TypeError, ValueError), match="group"):
            px.DistributedDataParallel(mlp(), process_group=group)


@ranks(2)
def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="device_ids and output_device arguments only work with"):
        px.DistributedDataParallel(mlp(), device_ids=[0])
    with pytest.raises(ValueError, match="device_ids and output_device arguments only work with"):
        px.DistributedDataParallel(mlp(), output_device=1)
    with pytest.raises(ValueError, match="can only be None or contain a single element"):
        px.DistributedDataParallel(mlp(), device_ids=[0, 1])
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh arguments"):
        px.DistributedDataParallel(mlp(), process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        px.DistributedDataParallel(mlp(), device_mesh=init_device_mesh("cpu", (2, 1)))
    with pytest.raises(ValueError, match="need to be set at the same time"):
        px.DistributedDataParallel(mlp(), delay_all_reduce_named_params=[])
    with pytest.raises(TypeError, match="mixed_precision"):
        px.DistributedDataParallel(mlp(), mixed_precision=object())
    with pytest.raises(ValueError, match="sample rate should be equal or greater than 1"):
        px.DistributedDataParallel(mlp())._set_ddp_runtime_logging_sample_rate(0)


@ranks(2)
def test_sync_batch_norm_on_the_cpu_is_refused_in_torchs_words() -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        px.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))


@ranks(2)
def test_it_is_not_a_module() -> None:
    with pytest.raises((AttributeError, TypeError)):
        px.DistributedDataParallel(torch.ones(2))


@ranks(2, timeout_s=20)
def test_arguments_that_do_not_fit_on_one_rank_alone() -> None:
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="device_ids and output_device"):
            px.DistributedDataParallel(mlp(), device_ids=[0])
    else:
        with pytest.raises(PhalanxError, match=r"rank 1.*device_ids and output_device"):
            px.DistributedDataParallel(mlp())
