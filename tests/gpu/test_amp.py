"""On one GPU: autocast, `GradScaler`, activation checkpointing and devices of inputs, against torch's DDP.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_amp.py``.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import (
    ALONE,
    DEVICE,
    ON_GPU,
    OURS,
    State,
    TorchDDP,
    autocast,
    compare,
    data,
    device_ids,
    gpu,
    main,
    parameters_of,
    run_checks,
    several_gpus,
    torch_ddp,
)

import phalanx as px

pytestmark = gpu

FACES = ["replicate", "replicate, small buckets", "ddp", "ddp, views"]


class Net(nn.Module):
    """A convolution, normalisation and layers that may be checkpointed."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)) for _ in range(4))
        self.head = nn.Linear(32, 4)
        self.checkpointing = checkpointing

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(images))).mean(3).flatten(1)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


def wrapped(which: str, module: nn.Module) -> nn.Module:
    return torch_ddp(module) if which == "torch" else OURS[which](module)


def images(step: int, part: int = 0) -> torch.Tensor:
    return data(dist.get_rank(), 10 * step + part, 4, 3, 4, 4)


def check_bfloat16() -> None:
    def run(which: str) -> State:
        module = Net().to(DEVICE)
        model = wrapped(which, module)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for step in range(10):
            optimizer.zero_grad(set_to_none=step % 4 != 3)
            with autocast(torch.bfloat16):
                loss = model(images(step)).float().square().mean()
            loss.backward()
            optimizer.step()
        return parameters_of(module)

    compare(run, FACES)


OVERFLOWS = {3: 0, 4: 1, 7: 0}  # step: rank


def scaled(which: str, *, accumulate: bool, clip: bool) -> State:
    """An infinite loss on one rank only must make every rank leave out that step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = Net().to(DEVICE)
    model = wrapped(which, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, growth_interval=3)
    scales, skipped = [], []
    for step in range(12):
        before = parameters_of(module)
        optimizer.zero_grad(set_to_none=step % 4 != 3)
        bad = OVERFLOWS.get(step) == rank
        for part in range(2 if accumulate else 1):
            keep: Any = contextlib.nullcontext()
            if accumulate and part == 0:
                keep = px.no_sync(module) if which.startswith("replicate") else model.no_sync()
            with keep:
                with autocast(torch.float16):
                    loss = model(images(step, part)).float().square().mean() * (float("inf") if bad else 1.0)
                scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if all(torch.equal(value, before[name]) for name, value in parameters_of(module).items()):
            skipped.append(step)
    wanted = [step for step, where in OVERFLOWS.items() if where < size]
    assert skipped == wanted, (which, rank, skipped, wanted)
    return {**parameters_of(module), "scales": torch.tensor(scales)}


def check_float16_with_a_scaler() -> None:
    compare(lambda which: scaled(which, accumulate=False, clip=False), FACES)


def check_float16_with_accumulation_and_clipping() -> None:
    compare(lambda which: scaled(which, accumulate=True, clip=True), FACES)


def check_checkpointing() -> None:
    for kind in ("reentrant", "not reentrant"):

        def run(which: str, kind: str = kind) -> State:
            module = Net(kind).to(DEVICE)
            model = wrapped(which, module)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            for step in range(9):
                optimizer.zero_grad()
                with autocast(torch.bfloat16, enabled=step % 2 == 0):
                    loss = model(images(step)).float().square().mean()
                loss.backward()
                optimizer.step()
            return parameters_of(module)

        compare(run, FACES)


def check_checkpointing_that_begins_later() -> None:
    """Reentrant, a layer's gradient comes in a pass within the pass: from the sixth step on, then no more."""

    def run(which: str) -> State:
        module = Net().to(DEVICE)
        model = wrapped(which, module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(15):
            module.checkpointing = "reentrant" if 5 <= step < 10 else "none"
            optimizer.zero_grad()
            model(images(step)).square().mean().backward()
            optimizer.step()
        return parameters_of(module)

    compare(run, FACES)


# -- where inputs and outputs are --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Reads(nn.Module):
    """Takes tensors in every kind of container, and says where they were."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 4)
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor, pair: Pair, *, named: dict[str, Any], plain: int, scale: torch.Tensor) -> Any:
        assert isinstance(pair, Pair) and plain == 7
        tensors = [x, pair.left, pair.right, *named["list"], scale]
        self.seen = [tensor.device.type for tensor in tensors]
        total = sum(tensor.to(self.linear.weight.device) for tensor in tensors[:-1])
        out = self.linear(total) * scale.to(self.linear.weight.device)
        return {"out": out, "pair": Pair(out + 1, out * 2)}


def check_devices() -> None:
    options: list[dict[str, Any]] = [{}, {"device_ids": None}]
    if ON_GPU:
        here = torch.cuda.current_device()
        options += [{"device_ids": device_ids()}, {"device_ids": [torch.device("cuda", here)]}]
        options += [{"device_ids": [here], "output_device": here}]
        options += [{"device_ids": [here], "output_device": f"cuda:{here}"}]
    rank = dist.get_rank()
    for option in options:
        results = []
        for cls in (TorchDDP, px.DistributedDataParallel):
            module = Reads().to(DEVICE)
            model = cls(module, **option)
            for step in range(4):
                x = [torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank + i)) for i in range(5)]
                named = {"list": [x[3], x[4]]}
                out = model(x[0], Pair(x[1], x[2]), named=named, plain=7, scale=torch.tensor(2.0))
                model.zero_grad()
                (out["out"].square().mean() + out["pair"].left.mean() + out["pair"].right.mean()).backward()
            results.append(
                (module.seen, out["pair"].left, module.linear.weight.grad, model.device_ids, model.output_device)
            )
        theirs, ours = results
        assert ours[0] == theirs[0], option
        assert torch.equal(ours[1], theirs[1]) and torch.equal(ours[2], theirs[2]), option
        assert ours[1].device == theirs[1].device, option
        assert ours[3:] == theirs[3:], option


def check_devices_that_are_refused() -> None:
    if not ON_GPU:
        return
    for options in ({"device_ids": [0, 1]}, {"device_ids": ["cpu"]}, {"output_device": 1}):
        errors = []
        for cls in (TorchDDP, px.DistributedDataParallel):
            try:
                cls(nn.Linear(2, 2).to(DEVICE), **options)
                errors.append(None)
            except Exception as error:
                errors.append(type(error))
        assert (errors[0] is None) == (errors[1] is None), (options, errors)
    mixed = nn.Sequential(nn.Linear(2, 2).to(DEVICE), nn.Linear(2, 2))
    for cls in (TorchDDP, px.DistributedDataParallel):
        refused = False
        try:
            cls(mixed, device_ids=device_ids())
        except Exception:
            refused = True
        assert refused, cls


CHECKS = [
    check_bfloat16,
    check_float16_with_a_scaler,
    check_float16_with_accumulation_and_clipping,
    check_checkpointing,
    check_checkpointing_that_begins_later,
    check_devices,
    check_devices_that_are_refused,
]


def test_alone_on_nccl() -> None:
    run_checks(CHECKS, world_size=1, backend=ALONE)


def test_two_ranks_on_gloo() -> None:
    run_checks(CHECKS, world_size=2, backend="gloo")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(test_alone_on_nccl, test_two_ranks_on_gloo, test_two_ranks_on_nccl)
