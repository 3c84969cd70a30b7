"""On one GPU: `gather_exact` of CUDA tensors, alone on NCCL and on the `phalanx` group, and as two ranks on Gloo.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_gather_exact.py``.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler

import phalanx as px

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # the GPU machine has torch and nothing else
    pytest = None  # type: ignore[assignment]

LENGTH = 37


def _evaluate(pad: bool, shuffle: bool, dst: int | None) -> None:
    sampler = px.DistributedSampler(range(LENGTH), shuffle=shuffle, pad=pad)  # type: ignore[arg-type]
    batches = list(sampler.track(DataLoader(range(LENGTH), 4, sampler=sampler)))  # type: ignore[arg-type]
    seen = torch.cat(batches)
    if pad:
        theirs: TorchSampler[int] = TorchSampler(range(LENGTH), shuffle=shuffle)  # type: ignore[arg-type]
        assert seen.tolist() == list(theirs)
    mine = {"score": seen.cuda().double().sqrt()[:, None], "label": (seen % 3).cuda().to(torch.int8), "host": seen}
    result = px.gather_exact(mine, sampler=sampler if pad or shuffle else None, dst=dst)
    if dst not in (None, dist.get_rank()):
        assert result is None
        return
    whole = torch.arange(LENGTH)
    assert torch.equal(result["host"], whole)
    assert torch.equal(result["label"], (whole % 3).cuda().to(torch.int8))
    assert torch.equal(result["score"], whole.cuda().double().sqrt()[:, None])


def _rank(rank: int, world_size: int, backend: str, file: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world_size)
    for dst in (None, 0):
        _evaluate(pad=False, shuffle=False, dst=dst)
        _evaluate(pad=True, shuffle=True, dst=dst)
    blind = torch.empty(0) if rank else torch.ones(3, 2, device="cuda")
    assert px.gather_exact(blind).shape == (3, 2)
    if world_size > 1:
        told = ""
        try:
            px.gather_exact(torch.ones(1, device="cuda" if rank else "cpu"))
        except ValueError as error:
            told = str(error)
        assert "cpu tensor" in told and "cuda tensor" in told
    dist.destroy_process_group()


def _run(backend: str, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world_size, backend, f"{folder}/store"), nprocs=world_size)  # type: ignore[no-untyped-call]


def test_nccl_alone() -> None:
    _run("nccl", 1)


def test_gloo() -> None:
    _run("gloo", 2)


def test_phalanx_alone() -> None:
    _run("phalanx", 1)  # two ranks on one GPU are more than NCCL takes, to which this group hands CUDA tensors


if __name__ == "__main__":
    for test in (test_nccl_alone, test_gloo, test_phalanx_alone):
        test()
        print(f"{test.__name__}: passed", flush=True)
