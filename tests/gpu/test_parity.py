"""On one GPU: `replicate` and our DDP against torch's DDP, alone on NCCL and as two ranks on Gloo.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_parity.py``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import (
    ALONE,
    DEVICE,
    autocast,
    device_ids,
    gpu,
    main,
    run_checks,
    several_gpus,
    torch_ddp,
)

import phalanx as px

pytestmark = gpu
Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "replicate": lambda module: px.replicate(module),
    "ddp": lambda module: px.DistributedDataParallel(module, device_ids=device_ids()),
    "ddp_view": lambda module: px.DistributedDataParallel(
        module, device_ids=device_ids(), gradient_as_bucket_view=True
    ),
    "ddp_static": lambda module: px.DistributedDataParallel(module, device_ids=device_ids(), static_graph=True),
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
    scaler = torch.amp.GradScaler(DEVICE, enabled=amp)
    rank = dist.get_rank()
    for step in range(8):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        with autocast(torch.float16, enabled=amp):
            loss = wrapped(images, use_extra=not branch or (step + rank) % 2 == 0).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def compare(wrap: str, *, amp: bool, branch: bool) -> None:
    torch.manual_seed(0)
    theirs = Branches().to(DEVICE)
    ours = copy.deepcopy(theirs)
    unused = {"find_unused_parameters": True} if branch else {}
    train(torch_ddp(theirs, **unused), theirs, amp=amp, branch=branch)
    train(WRAPS[wrap](ours), ours, amp=amp, branch=branch)
    for (name, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, reference, msg=lambda text, name=name: f"{wrap} {name}: {text}")


def check_each_face_and_amp() -> None:
    for wrap in WRAPS:
        for amp in (False, True):
            compare(wrap, amp=amp, branch=False)


def check_a_branch_that_is_not_always_used() -> None:
    compare("replicate", amp=False, branch=True)


def check_the_phalanx_group() -> None:
    """It hands tensors on a GPU to NCCL."""
    size = dist.get_world_size()
    total = torch.ones(4, device=DEVICE)
    dist.all_reduce(total)
    assert total.sum().item() == 4 * size
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    assert gathered == [{"rank": rank} for rank in range(size)]
    compare("replicate", amp=False, branch=False)


CHECKS = [check_each_face_and_amp, check_a_branch_that_is_not_always_used]


def test_alone_on_nccl() -> None:
    run_checks(CHECKS, world_size=1, backend=ALONE)


def test_two_ranks_on_gloo() -> None:
    run_checks(CHECKS, world_size=2, backend="gloo")


def test_the_phalanx_group_hands_cuda_to_nccl() -> None:
    run_checks([check_the_phalanx_group], world_size=1, backend="phalanx")


@several_gpus
def test_the_phalanx_group_hands_cuda_to_nccl_among_two() -> None:
    run_checks([*CHECKS, check_the_phalanx_group], world_size=2, backend="phalanx")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(
        test_alone_on_nccl,
        test_two_ranks_on_gloo,
        test_two_ranks_on_nccl,
        test_the_phalanx_group_hands_cuda_to_nccl,
        test_the_phalanx_group_hands_cuda_to_nccl_among_two,
    )
