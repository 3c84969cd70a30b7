"""What a training step on one GPU costs: bare, under torch's DDP in its best setting, and under ours.

    PYTHONPATH=src python benchmarks/gpu_step.py --json FILE

NCCL at world size 1: what is measured is the reducer's own cost, on the host and in copies, with the collectives called
as in a larger world. (`replicate` alone would skip them; here it does not, as torch's DDP does not. `--alone` shows, in
rows "skips", what it really costs alone.) Variants take turns within a round, in random order; overheads are differences
within a round. A turn is one step that is not timed, so that what the others have driven out of the caches comes back, and
then some steps in a row, as in training, after which the device is waited for. The process stays on one core, the quietest
there is: where a machine is shared, two cores may differ by more than what is measured (`--all-cores` allows all).
How fast a variant is depends on where in memory its objects come to lie, so all are made anew some times; ratios by place
are shown, too. Several NCCL ranks one GPU cannot show.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from _gpu_models import TASKS, GpuTask
from _quiet import stay_on_the_quietest_core, use_all_cores
from _spread import ratio_by_place, spread_by_place

import phalanx as px
from phalanx.api.replica import replica_of

TURN_MS = 50.0
SHARES = {"gpt": 1.5, "linears": 2.0, "small": 2.0}  # what is measured is little beside the step, or the step is long
TorchDDP = torch.nn.parallel.DistributedDataParallel


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
    replica.reducer.communicate_alone()
    return made


def _ddp(module: nn.Module) -> nn.Module:
    made = px.DistributedDataParallel(module, device_ids=[0], gradient_as_bucket_view=True)
    made._engine.communicate_alone()
    made._broadcasts_alone = True
    return made


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "torch": _torch,
    "torch plain": _torch_plain,
    "replicate": _replicate,
    "our DDP": _ddp,
    "skips": px.replicate,
}
TORCHS = ("torch", "torch plain")
NUM_PLACES = 6
PLACES_TO_DROP = 2


class Trainer:
    """One variant of a task, step by step, in the same place in memory all along."""

    def __init__(self, task: GpuTask, model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.task = task
        self.module = wrap(model)
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


def _peak_mib(name: str, variant: str) -> float:
    """The most that a step holds beyond the task's batch. In a process of its own: nothing else is there."""
    _start(port=29578 + random.randrange(20000))
    task = TASKS[name]()
    held = torch.cuda.memory_allocated()
    trainer = Trainer(task, task.make().cuda(), VARIANTS[variant])
    trainer.timed(5)
    torch.cuda.reset_peak_memory_stats()
    trainer.timed(2)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    dist.destroy_process_group()
    return peak


def measure_memory(names: list[str], variants: list[str]) -> dict[str, dict[str, float]]:
    with ProcessPoolExecutor(max_workers=6, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        asked = {(name, variant): pool.submit(_peak_mib, name, variant) for name in names for variant in variants}
        return {name: {variant: asked[name, variant].result() for variant in variants} for name in names}


class Turns:
    """Variants that take turns; what each took per step, by place and round."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.times: dict[str, list[list[float]]] = {name: [] for name in names}
        self.num_steps = 0

    def begin_place(self) -> None:
        for name in self.names:
            self.times[name].append([])

    @property
    def num_rounds(self) -> int:
        """In this place."""
        return len(self.times["bare"][-1])

    def take(self, trainers: dict[str, Trainer]) -> None:
        """One round."""
        if not self.num_steps:
            one = statistics.median(trainers["bare"].timed(1) for _ in range(3))
            self.num_steps = max(1, min(8, round(TURN_MS / one)))
        for name in random.sample(self.names, len(self.names)):
            trainers[name].timed(1)
            self.times[name][-1].append(trainers[name].timed(self.num_steps))
        gc.collect()  # its pauses would be longer than what is measured

    def drop_the_slower(self, one: str, other: str) -> None:
        """Of two, go on without one that has hardly ever been the faster, in several places."""
        if not {one, other} <= set(self.names) or len(self.times[one]) < PLACES_TO_DROP:
            return
        for slower, faster in ((one, other), (other, one)):
            if all(map(_is_hardly_ever_less, self.times[slower], self.times[faster])):
                self.names.remove(slower)


def _is_hardly_ever_less(these: list[float], those: list[float]) -> bool:
    won = sum(a < b for a, b in zip(these, those, strict=True))
    return won <= len(these) / 10


def measure(name: str, variants: list[str], *, seconds: float) -> dict[str, Any]:
    task = TASKS[name]()
    model = task.make().cuda()
    turns = Turns(variants)
    for _ in range(NUM_PLACES):
        trainers = {variant: Trainer(task, copy.deepcopy(model), VARIANTS[variant]) for variant in turns.names}
        for trainer in trainers.values():
            trainer.timed(6)
        gc.collect()
        gc.disable()
        turns.begin_place()
        until = time.perf_counter() + seconds / NUM_PLACES
        while turns.num_rounds < 3 or time.perf_counter() < until:
            turns.take(trainers)
        gc.enable()
        del trainers, trainer
        gc.collect()
        turns.drop_the_slower(*TORCHS)
    return _summary(turns) | {
        "model": name,
        "about": task.about,
        "num_parameters": sum(1 for _ in model.parameters()),
    }


def _summary(turns: Turns) -> dict[str, Any]:
    """Of all places and rounds."""
    times = turns.times
    best = min(
        (variant for variant in TORCHS if variant in turns.names), key=lambda name: statistics.median(_all(times[name]))
    )
    (other,) = (variant for variant in TORCHS if variant != best)
    shown = {variant: values for variant, values in times.items() if variant != other}
    extra = {variant: _differences(values, times["bare"]) for variant, values in shown.items()}

    def ratio_in(place: int, variant: str) -> float:
        return statistics.median(extra[variant][place]) / (statistics.median(extra[best][place]) or math.nan)

    return {
        "best": best,
        "other": {other: statistics.median(_all(times[other]))},
        "rounds": len(_all(times["bare"])),
        "steps per turn": turns.num_steps,
        "ms": {variant: vars(spread_by_place(values)) for variant, values in shown.items()},
        "overhead": {
            variant: {
                "ms": vars(spread_by_place(values)),
                "of torch's": vars(ratio_by_place(values, extra[best])),
                "of torch's, by place": [ratio_in(place, variant) for place in range(NUM_PLACES)],
            }
            for variant, values in extra.items()
        },
    }


def _all(by_place: list[list[float]]) -> list[float]:
    return [value for place in by_place for value in place]


def _differences(these: list[list[float]], those: list[list[float]]) -> list[list[float]]:
    return [[a - b for a, b in zip(one, other, strict=True)] for one, other in zip(these, those, strict=True)]


def show(result: dict[str, Any]) -> None:
    turns = f"{result['rounds']} rounds of {result['steps per turn']} steps"
    other = ", ".join(f"{variant} {value:.2f} ms" for variant, value in result["other"].items())
    print(
        f"\n{result['about']}, {result['num_parameters']} parameters, {turns}; torch's best: {result['best']} ({other})"
    )
    for variant, value in result["ms"].items():
        overhead = result["overhead"][variant]
        extra, ratio, ratios = overhead["ms"], overhead["of torch's"], overhead["of torch's, by place"]
        adds = f"{extra['median']:7.2f} [{extra['low']:.2f}, {extra['high']:.2f}]"
        line = f"  {variant:12} {value['median']:8.2f} ms  adds {adds}"
        if "peak MiB" in result:
            line += f"  peak {result['peak MiB'][variant]:8.2f} MiB"
        if variant not in ("bare", result["best"]):
            by_place = ", ".join(f"{one:.2f}" for one in ratios)
            line += f"   {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] of torch's ({by_place})"
        print(line)
    sys.stdout.flush()


def _start(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(TASKS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of measuring per model")
    parser.add_argument("--all-cores", action="store_true", help="do not stay on the quietest core")
    parser.add_argument("--without-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument("--quick", action="store_true", help="few rounds: that it runs, not what it measures")
    parser.add_argument("--alone", action="store_true", help="also `replicate` as it is alone, without collectives")
    arguments = parser.parse_args()
    variants = [variant for variant in VARIANTS if arguments.alone or variant != "skips"]
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU: nothing measured")
        return
    torch.set_num_threads(1)  # they would be many to a core, and wait for each other in turn
    names = arguments.models.split(",")
    peaks = {} if arguments.quick or arguments.without_memory else measure_memory(names, variants)
    _start(port=29577)
    results = []
    for name in names:
        if not arguments.all_cores:
            use_all_cores()
            stay_on_the_quietest_core()
        result = measure(name, variants, seconds=1.0 if arguments.quick else arguments.seconds * SHARES.get(name, 1.0))
        results.append({**result, "peak MiB": peaks[name]} if peaks else result)
        show(results[-1])
        torch.cuda.empty_cache()
        if arguments.json:  # each time: the machine may be taken away
            about = {
                "device": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "cores": "all" if arguments.all_cores else "the quietest",
            }
            arguments.json.write_text(json.dumps({**about, "results": results}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
