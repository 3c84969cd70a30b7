"""On one GPU: `gather_exact` of CUDA tensors, alone on NCCL and on the `phalanx` group, and as two ranks on Gloo.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_gather_exact.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import ALONE, DEVICE, ON_GPU, gpu, main, run_checks, several_gpus

import phalanx as px

pytestmark = gpu
LENGTH = 37


def _evaluate(pad: bool, shuffle: bool, dst: int | None) -> None:
    sampler = px.DistributedSampler(range(LENGTH), shuffle=shuffle, pad=pad)  # type: ignore[arg-type]
    batches = list(sampler.track(DataLoader(range(LENGTH), 4, sampler=sampler)))  # type: ignore[arg-type]
    seen = torch.cat(batches)
    if pad:
        theirs: TorchSampler[int] = TorchSampler(range(LENGTH), shuffle=shuffle)  # type: ignore[arg-type]
        assert seen.tolist() == list(theirs)
    mine = {
        "score": seen.to(DEVICE).double().sqrt()[:, None],
        "label": (seen % 3).to(DEVICE).to(torch.int8),
        "host": seen,
    }
    result = px.gather_exact(mine, sampler=sampler if pad or shuffle else None, dst=dst)
    if dst not in (None, dist.get_rank()):
        assert result is None
        return
    whole = torch.arange(LENGTH)
    assert torch.equal(result["host"], whole)
    assert torch.equal(result["label"], (whole % 3).to(DEVICE).to(torch.int8))
    assert torch.equal(result["score"], whole.to(DEVICE).double().sqrt()[:, None])


def check_gathered() -> None:
    for dst in (None, 0):
        _evaluate(pad=False, shuffle=False, dst=dst)
        _evaluate(pad=True, shuffle=True, dst=dst)
    blind = torch.empty(0) if dist.get_rank() else torch.ones(3, 2, device=DEVICE)
    assert px.gather_exact(blind).shape == (3, 2)


def check_different_devices_are_told() -> None:
    if not ON_GPU or dist.get_world_size() == 1:
        return
    told = ""
    try:
        px.gather_exact(torch.ones(1, device=DEVICE if dist.get_rank() else "cpu"))
    except ValueError as error:
        told = str(error)
    assert "cpu tensor" in told and "cuda tensor" in told


CHECKS = [check_gathered, check_different_devices_are_told]


def test_alone_on_nccl() -> None:
    run_checks(CHECKS, world_size=1, backend=ALONE)


def test_two_ranks_on_gloo() -> None:
    run_checks(CHECKS, world_size=2, backend="gloo")


def test_alone_on_phalanx() -> None:
    run_checks(CHECKS, world_size=1, backend="phalanx")


@several_gpus
def test_two_ranks_on_phalanx() -> None:
    """This group hands CUDA tensors to NCCL."""
    run_checks(CHECKS, world_size=2, backend="phalanx")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(
        test_alone_on_nccl,
        test_two_ranks_on_gloo,
        test_two_ranks_on_nccl,
        test_alone_on_phalanx,
        test_two_ranks_on_phalanx,
    )
