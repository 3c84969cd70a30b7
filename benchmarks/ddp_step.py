"""What synchronisation costs in a training step: bare, torch's DDP and Phalanx, interleaved in one run on two ranks.

    python benchmarks/ddp_step.py [--json FILE] [--quick] [--model NAME …]

Each round trains one step of every variant, in a random order that is the same on both ranks, with torch's best between
our two on the same transport; a ratio is that of two variants within a round. Every model is run with glibc's allocator
as it is and with its trim and mmap thresholds raised (which spares every variant the page faults of fresh gradients).
Memory is that of gradients, buckets and pending copies.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _models import TASKS, Task
from _spread import paired_ratio
from _two_ranks import run_as_two_ranks
from torch import nn

import phalanx as px
from phalanx import events
from phalanx.api.replica import replica_of

TorchDDP = torch.nn.parallel.DistributedDataParallel
RAISED = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
ALLOCATORS: dict[str, dict[str, str]] = {"default": {}, "raised": RAISED}
WARM_UP_ROUNDS = 4

Wrap = Callable[[nn.Module], nn.Module]


def variants(shared: dist.ProcessGroup | None) -> dict[str, Wrap]:
    """By name. Those on the `phalanx` backend are there where it is."""
    made: dict[str, Wrap] = {
        "bare": lambda module: module,
        "torch": TorchDDP,
        "torch_view": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
        "phalanx": lambda module: px.replicate(module),
        "phalanx_ddp": lambda module: px.DistributedDataParallel(module, gradient_as_bucket_view=True),
    }
    if shared is not None:
        made["phalanx_shm"] = lambda module: px.replicate(module, process_group=shared)
    return made


def measure(task: Task, num_rounds: int, shared: dist.ProcessGroup | None) -> dict[str, list[float]]:
    """Seconds per step, by variant and round; the slower rank's."""
    torch.manual_seed(0)
    original = task.make()
    steps = {}
    for name, wrap in variants(shared).items():
        module = task.make()
        module.load_state_dict(original.state_dict())
        wrapped = wrap(module)
        steps[name] = _step_of(task, wrapped, torch.optim.SGD(module.parameters(), lr=1e-4))
    times: dict[str, list[float]] = {name: [] for name in steps}
    source = random.Random(0)
    for number in range(WARM_UP_ROUNDS + num_rounds):
        for name in _order(list(steps), source):
            gc.collect(0)
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            took = time.perf_counter() - began
            if number >= WARM_UP_ROUNDS:
                times[name].append(took)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    return {name: [max(pair) for pair in zip(*(rank[name] for rank in everyone), strict=True)] for name in steps}


def _order(names: list[str], source: random.Random) -> list[str]:
    """Random, but that what is compared stands side by side: the machine's speed drifts within a round, too."""
    beside = ["phalanx", "torch_view", "phalanx_ddp"]
    others = [name for name in names if name not in beside]
    source.shuffle(others)
    if source.random() < 0.5:
        beside.reverse()
    place = source.randrange(len(others) + 1)
    return others[:place] + beside + others[place:]


def _step_of(task: Task, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        task.loss(wrapped).backward()
        optimizer.step()

    return step


def peak_memory(task: Task) -> dict[str, float]:
    """Bytes of distinct storages behind gradients, buckets and pending copies at their peak, sampled at every event."""
    module = px.replicate(task.make())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    reducer = replica_of(module).reducer
    peak = 0

    def sample(_: events.Event) -> None:
        nonlocal peak
        tensors = [p.grad for p in module.parameters() if p.grad is not None]
        tensors += [bucket.buffer for bucket in reducer.buckets]
        tensors += [t for slot in reducer.slots for t in (slot.late, slot.stale) if t is not None]
        peak = max(peak, sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values()))

    stop = events.listen(sample)
    for _ in range(4):
        _step_of(task, module, optimizer)()
    stop()
    gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    largest = max(bucket.buffer.nbytes for bucket in reducer.buckets)
    return {"peak": peak, "gradients": gradients, "largest_bucket": largest}


def run_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=2)
    shared = _shared_memory_group()
    task = TASKS[arguments.rank_model]()
    found = {"times": measure(task, arguments.rounds, shared), "memory": peak_memory(task)}
    if arguments.rank == 0:
        Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    del task
    gc.collect()
    dist.destroy_process_group()


def _shared_memory_group() -> dist.ProcessGroup | None:
    if "PHALANX" not in dist.Backend._plugins:
        return None
    group = dist.new_group([0, 1], backend="phalanx")
    return group if isinstance(group, dist.ProcessGroup) else None


def run_model(model: str, allocator: str, num_rounds: int) -> dict[str, Any]:
    return run_as_two_ranks(__file__, ["--rounds", str(num_rounds), "--rank-model", model], ALLOCATORS[allocator])


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Ratios against the better of torch's variants, and overheads over bare where they can be told from noise."""
    times = found["times"]
    better = min(("torch", "torch_view"), key=lambda name: statistics.median(times[name]))
    bare = statistics.median(times["bare"])
    own_spread = statistics.pstdev(times["bare"])
    ours = [name for name in times if name.startswith("phalanx")]
    overhead = {name: statistics.median(times[name]) - bare for name in times if name != "bare"}
    return {
        "better_of_torch": better,
        "medians_ms": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "bare_spread_ms": own_spread * 1e3,
        "ratio": {name: asdict(paired_ratio(times[name], times[better])) for name in ours},
        "overhead_ms": {name: value * 1e3 for name, value in overhead.items() if value > own_spread},
        "overhead_ratio": {
            name: asdict(paired_ratio(_over_bare(times, name), _over_bare(times, better)))
            for name in ours
            if overhead[better] > own_spread
        },
        "memory": found["memory"],
    }


def _over_bare(times: dict[str, list[float]], name: str) -> list[float]:
    """Overhead by round over bare's median, never below a hundredth of it: a ratio needs a positive denominator."""
    bare = statistics.median(times["bare"])
    return [max(value - bare, bare / 100) for value in times[name]]


def show(model: str, allocator: str, verdict: dict[str, Any]) -> None:
    medians = "  ".join(f"{name} {value:.1f}" for name, value in verdict["medians_ms"].items())
    print(f"{model}, allocator {allocator}: medians in ms: {medians}  (bare's spread {verdict['bare_spread_ms']:.1f})")
    for name, ratio in verdict["ratio"].items():
        print(
            f"    {name:12} / {verdict['better_of_torch']}: "
            f"{ratio['median']:.3f}  95 % [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        )
    for name, ratio in verdict["overhead_ratio"].items():
        print(
            f"    overhead over bare, {name} / {verdict['better_of_torch']}: "
            f"{ratio['median']:.2f}  95 % [{ratio['low']:.2f}, {ratio['high']:.2f}]"
        )
    memory = verdict["memory"]
    bound = memory["gradients"] + memory["largest_bucket"]
    print(f"    memory at its peak {memory['peak'] / 2**20:.1f} MiB; gradients + one bucket {bound / 2**20:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs, not what it costs")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--model", action="append", choices=list(TASKS), help="only this one; may be given again")
    for hidden in ("--rank-model", "--store", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    results: dict[str, dict[str, Any]] = {}
    for model in arguments.model or TASKS:
        for allocator in ALLOCATORS:
            found = run_model(model, allocator, 4 if arguments.quick else arguments.rounds)
            verdict = results.setdefault(model, {})[allocator] = judge(found)
            show(model, allocator, verdict)
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
