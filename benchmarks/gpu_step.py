"""What a training step on one GPU costs: bare, under torch's DDP in its best setting, and under ours.

    PYTHONPATH=src python benchmarks/gpu_step.py --json FILE

NCCL at world size 1: what is measured is the reducer's own cost, on the host and in copies, with the collectives called
as in a larger world. (`replicate` alone would skip them; here it does not, as torch's DDP does not. The rows "skips" show
what it really costs alone.) Variants take turns within a round, in random order; ratios are of the same round.
Several NCCL ranks one GPU cannot show.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from _gpu_models import TASKS, GpuTask
from _spread import paired_ratio, spread

import phalanx as px
from phalanx.api.replicate import replica_of
from phalanx.reducer.reducer import Reducer

TorchDDP = torch.nn.parallel.DistributedDataParallel


def _communicate_alone(reducer: Reducer) -> None:
    """Call the collectives although there is nobody else."""
    reducer._carrier._reduces_alone = True
    reducer.options = replace(reducer.options, reduce_alone=True)


def _torch(module: nn.Module) -> nn.Module:
    options: dict[str, Any] = {"device_ids": [0], "gradient_as_bucket_view": True}
    try:
        return TorchDDP(module, batched_grad_copy=True, **options)
    except TypeError:  # a version that has it not
        return TorchDDP(module, **options)


def _torch_plain(module: nn.Module) -> nn.Module:
    return TorchDDP(module, device_ids=[0])


def _replicate(module: nn.Module) -> nn.Module:
    made = px.replicate(module)
    replica = replica_of(made)
    replica.buffers.alone_too = True
    _communicate_alone(replica.reducer)
    return made


def _ddp(module: nn.Module) -> nn.Module:
    made = px.DistributedDataParallel(module, device_ids=[0], gradient_as_bucket_view=True)
    _communicate_alone(made._engine)
    return made


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "torch": _torch,
    "torch plain": _torch_plain,
    "replicate": _replicate,
    "our DDP": _ddp,
    "skips": px.replicate,
}


class Trainer:
    """One variant of a task, step by step, in the same place in memory all along."""

    def __init__(self, task: GpuTask, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.task = task
        self.module = wrap(task.make().cuda())
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4, foreach=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.module).backward()
        self.optimizer.step()

    def timed(self, num_steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / num_steps * 1e3


def _peak_mib(task: GpuTask, wrap: Callable[[nn.Module], nn.Module]) -> float:
    """The most that a step holds, above what the task's batch takes, with no other variant beside it."""
    gc.collect()
    held = torch.cuda.memory_allocated()
    trainer = Trainer(task, wrap)
    trainer.timed(5)
    torch.cuda.reset_peak_memory_stats()
    trainer.timed(2)
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def measure(name: str, *, rounds: int, num_steps: int) -> dict[str, Any]:
    task = TASKS[name]()
    peaks = {variant: _peak_mib(task, wrap) for variant, wrap in VARIANTS.items()}
    trainers: dict[str, Trainer] = {}
    for variant, wrap in VARIANTS.items():
        trainers[variant] = Trainer(task, wrap)
        trainers[variant].timed(6)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    order = list(VARIANTS)
    for _ in range(rounds):
        random.shuffle(order)
        for variant in order:
            trainers[variant].timed(1)
            times[variant].append(trainers[variant].timed(num_steps))
    best = min(("torch", "torch plain"), key=lambda variant: statistics.median(times[variant]))
    result: dict[str, Any] = {
        "model": name,
        "about": task.about,
        "num_parameters": sum(1 for _ in task.make().parameters()),
        "best": best,
        "ms": {variant: vars(spread(values)) for variant, values in times.items()},
        "peak MiB": peaks,
        "overhead / torch's": {},
    }
    base = [a - b for a, b in zip(times[best], times["bare"], strict=True)]
    for variant in ("replicate", "our DDP", "skips"):
        extra = [a - b for a, b in zip(times[variant], times["bare"], strict=True)]
        result["overhead / torch's"][variant] = {
            "of medians": statistics.median(extra) / statistics.median(base),
            **vars(paired_ratio(extra, base)),
        }
    return result


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['about']}, {result['num_parameters']} parameters; torch's best: {result['best']}")
    for variant, value in result["ms"].items():
        peak, ratio = result["peak MiB"][variant], result["overhead / torch's"].get(variant)
        line = (
            f"  {variant:12} {value['median']:8.2f} ms [{value['low']:.2f}, {value['high']:.2f}]  peak {peak:8.1f} MiB"
        )
        if ratio is not None:
            line += f"   overhead {ratio['of medians']:.2f} of torch's [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        print(line)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(TASKS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rounds: that it runs, not what it measures")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU: nothing measured")
        return
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29577"), RANK="0", WORLD_SIZE="1"
    )
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rounds = 3 if arguments.quick else arguments.rounds
    results = []
    for name in arguments.models.split(","):
        results.append(measure(name, rounds=rounds, num_steps=arguments.steps))
        show(results[-1])
        torch.cuda.empty_cache()
    if arguments.json:
        about = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
