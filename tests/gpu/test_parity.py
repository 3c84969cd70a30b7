"""On one GPU: `replicate` and our DDP against torch's DDP, alone on NCCL and as two ranks on Gloo.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_parity.py``.
"""

from __future__ import annotations

import copy
import tempfile
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import phalanx as px

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # the GPU machine has torch and nothing else
    pytest = None  # type: ignore[assignment]

TorchDDP = torch.nn.parallel.DistributedDataParallel
Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "replicate": lambda module: px.replicate(module),
    "ddp": lambda module: px.DistributedDataParallel(module, device_ids=[0]),
    "ddp_view": lambda module: px.DistributedDataParallel(module, device_ids=[0], gradient_as_bucket_view=True),
    "ddp_static": lambda module: px.DistributedDataParallel(module, device_ids=[0], static_graph=True),
}


class Branches(nn.Module):
    """Conv, BatchNorm and a branch that is used in every other step, by one rank more often than by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.extra = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        hidden = self.stem(images)
        if use_extra:
            hidden = hidden + self.extra(hidden)
        return self.head(hidden.mean((2, 3)))


def train(wrapped: nn.Module, module: nn.Module, *, amp: bool, branch: bool) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    rank = dist.get_rank()
    for step in range(8):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank)).cuda()
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = wrapped(images, use_extra=not branch or (step + rank) % 2 == 0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def compare(wrap: str, *, amp: bool, branch: bool) -> None:
    torch.manual_seed(0)
    theirs = Branches().cuda()
    ours = copy.deepcopy(theirs)
    unused = {"find_unused_parameters": True} if branch else {}
    train(TorchDDP(theirs, device_ids=[0], **unused), theirs, amp=amp, branch=branch)
    train(WRAPS[wrap](ours), ours, amp=amp, branch=branch)
    for (name, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, msg=lambda text, name=name: f"{wrap} {name}: {text}")


def _rank(rank: int, world_size: int, backend: str, store: str) -> None:
    torch.cuda.set_device(0)
    torch.backends.cudnn.deterministic = True
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    for wrap in WRAPS:
        for amp in (False, True):
            compare(wrap, amp=amp, branch=False)
    compare("replicate", amp=False, branch=True)
    dist.barrier()
    dist.destroy_process_group()


def _run(world_size: int, backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (world_size, backend, f"{folder}/store"), nprocs=world_size, start_method="spawn")


def test_alone_on_nccl() -> None:
    _run(1, "nccl")


def test_two_ranks_on_gloo() -> None:
    _run(2, "gloo")


def _routed(rank: int, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("phalanx", init_method=f"file://{store}", rank=rank, world_size=1)
    total = torch.ones(4, device="cuda")
    dist.all_reduce(total)
    assert total.sum().item() == 4
    gathered: list[object] = [None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": 0}]
    compare("replicate", amp=False, branch=False)
    dist.destroy_process_group()


def test_the_phalanx_group_hands_cuda_to_nccl() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_routed, (f"{folder}/store",), nprocs=1, start_method="spawn")


if __name__ == "__main__":
    failed = 0
    for test in (test_alone_on_nccl, test_two_ranks_on_gloo, test_the_phalanx_group_hands_cuda_to_nccl):
        try:
            test()
            print("passed", test.__name__, flush=True)
        except Exception:
            failed += 1
            print("FAILED", test.__name__, flush=True)
            traceback.print_exc()
    raise SystemExit(failed)
