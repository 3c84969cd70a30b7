"""On one GPU: the models of `tests/parity` and steps of every kind, against torch's DDP.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_models.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import (
    ALONE,
    CLOSE,
    DEVICE,
    OURS,
    State,
    beyond_the_stand_in,
    compare,
    data,
    gpu,
    main,
    parameters_of,
    run_checks,
    several_gpus,
    torch_ddp,
)
from tests.parity.models import CASES, Case

import phalanx as px
from phalanx.api.replica import replica_of

pytestmark = gpu


def loss_of(case: Case, model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    x = case.inputs(generator)
    out = model(x.to(DEVICE, dtype if x.is_floating_point() else x.dtype), dist.get_rank())
    out = out.reshape(-1, out.shape[-1])
    target = torch.randint(0, case.classes, (out.shape[0],), generator=generator).to(DEVICE)
    return F.cross_entropy(out.float(), target)


def train_case(name: str, which: str, *, dtype: torch.dtype = torch.float32, steps: int = 12) -> State:
    case = CASES[name]
    module = case.model(dtype).to(DEVICE)
    if which != "torch":
        model = OURS[which](module)
    else:
        if name == "sparse_embedding" and dist.get_backend() == "nccl":
            module.embed.sparse = False  # torch's DDP cannot reduce sparse gradients there: the same ones, dense
        model = torch_ddp(module, find_unused_parameters=case.unused)
    optimizer = case.optimizer(module)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 3 != 2)
        loss_of(case, model, step, dtype).backward()
        optimizer.step()
    return parameters_of(module)


@beyond_the_stand_in("Gloo adds up sparse tensors in threads of its own", on="gloo")
def check_models() -> None:
    for name, case in CASES.items():
        faces = ["replicate", "replicate, small buckets", "ddp, unused"]
        compare(
            lambda which, name=name: train_case(name, which),
            faces + ([] if case.unused else ["ddp", "ddp, views"]),
            close=CLOSE if name == "sparse_embedding" else None,  # added up by atomic operations, in any order
        )


def check_half_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for name in ("mlp", "conv_batchnorm", "transformer_tied"):
            compare(
                lambda which, name=name, dtype=dtype: train_case(name, which, dtype=dtype, steps=8),
                ["replicate", "replicate, small buckets", "ddp", "ddp, views"],
            )


def check_float64() -> None:
    compare(lambda which: train_case("transformer_tied", which, dtype=torch.float64), ["replicate", "ddp, views"])


# -- steps that are not all alike --------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers that are called in an order which the caller names; each as often as it is named."""

    def __init__(self, count: int = 6, width: int = 24) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return self.head(x)


def train_layers(
    which: str, order_of: Callable[[int, int], list[int]], *, steps: int = 24, unused: bool = False
) -> State:
    rank = dist.get_rank()
    module = Layers().to(DEVICE)
    model = torch_ddp(module, find_unused_parameters=unused) if which == "torch" else OURS[which](module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 5 != 4)
        model(data(rank, step, 7, 24), order_of(rank, step)).square().mean().backward()
        optimizer.step()
    return parameters_of(module)


REGULAR = list(range(6))
ORDERED = ["replicate", "replicate, small buckets", "ddp", "ddp, views"]


def check_order_changes_every_few_steps() -> None:
    def order_of(_: int, step: int) -> list[int]:
        return [REGULAR, REGULAR[::-1], [3, 1, 5, 0, 2, 4]][step // 6 % 3]

    compare(lambda which: train_layers(which, order_of), ORDERED)


def check_order_changes_in_every_step_and_differs_between_ranks() -> None:
    def order_of(rank: int, step: int) -> list[int]:
        return torch.randperm(6, generator=torch.Generator().manual_seed(10 * step + rank)).tolist()

    compare(lambda which: train_layers(which, order_of), ["replicate", "ddp", "ddp, views"])


def check_unused_parameters_change_per_step_and_rank() -> None:
    def order_of(rank: int, step: int) -> list[int]:
        return REGULAR if step % 4 else [index for index in REGULAR if (index + step // 4 + rank) % 3]

    compare(
        lambda which: train_layers(which, order_of, unused=True),
        ["replicate", "replicate, small buckets", "ddp, unused"],
    )


def check_layers_used_twice_now_and_then() -> None:
    def order_of(_: int, step: int) -> list[int]:
        return REGULAR if step % 5 else [0, 1, 2, 1, 0, 3, 4, 5]

    compare(lambda which: train_layers(which, order_of), ORDERED)


def check_accumulation() -> None:
    def run(which: str, whole: bool) -> State:
        rank = dist.get_rank()
        module = Layers().to(DEVICE)
        model = torch_ddp(module) if which == "torch" else OURS[which](module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        replicated = which.startswith("replicate")
        for step in range(10):
            optimizer.zero_grad(set_to_none=step % 2 == 0)

            def backward(part: int, step: int = step) -> None:
                (model(data(rank, 10 * step + part, 5, 24), REGULAR).square().mean() / 3).backward()

            if replicated and whole:
                with px.accumulate(module, 3):
                    for part in range(3):
                        backward(part)
            else:
                with px.no_sync(module) if replicated else model.no_sync():
                    backward(0)
                    backward(1)
                backward(2)
            optimizer.step()
        return parameters_of(module)

    compare(lambda which: run(which, True), ["replicate", "replicate, small buckets", "ddp", "ddp, views"])
    compare(lambda which: run(which, False), ["replicate"])


def check_freezing() -> None:
    def run(which: str) -> State:
        rank = dist.get_rank()
        module = Layers().to(DEVICE)
        model = torch_ddp(module, find_unused_parameters=True) if which == "torch" else OURS[which](module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for step in range(18):
            optimizer.zero_grad()
            # A frozen parameter of torch's DDP counts as unused.
            for index in (1, 4):
                module.layers[index].requires_grad_(not 6 <= step < 12)
            model(data(rank, step, 5, 24), REGULAR).square().mean().backward()
            optimizer.step()
        return parameters_of(module)

    compare(run, ["replicate", "ddp, unused"])


def check_the_roll_is_formed_and_comes_back() -> None:
    rank = dist.get_rank()
    # In one run: the order of runs is of no account, nor that within one, as long as its last comes last.
    for name in ("replicate", "ddp"):
        module = Layers().to(DEVICE)
        model = OURS[name](module)
        reducer = replica_of(module).reducer if name.startswith("replicate") else model._engine
        seen = []
        for step in range(24):
            model.zero_grad()
            model(data(rank, step, 5, 24), REGULAR[::-1] if 8 <= step < 12 else REGULAR).square().mean().backward()
            seen.append(reducer.arrivals.roll is not None)
        assert seen[7], f"{name}: not formed in eight alike steps"
        assert not seen[8], f"{name}: the order was lost, and the roll not"
        assert seen[-1], f"{name}: not formed anew"


CHECKS = [
    check_models,
    check_half_precision,
    check_float64,
    check_order_changes_every_few_steps,
    check_order_changes_in_every_step_and_differs_between_ranks,
    check_unused_parameters_change_per_step_and_rank,
    check_layers_used_twice_now_and_then,
    check_accumulation,
    check_freezing,
    check_the_roll_is_formed_and_comes_back,
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
