"""What a reducer costs the host, with next to nothing to compute or to send: the part that a fast device makes visible.

    python benchmarks/host_cost.py [--json FILE] [--quick] [--parameters 150,1000,5000] [--cold]

One process, world size 1 on Gloo with the collectives called all the same, layers of 8 x 8 on the CPU: a step is all host
work, and what a variant adds to the bare step is what its Python or C++ takes. Variants take turns step by step, in random
order. On a GPU the same host work comes on top of launching kernels (`gpu_step.py`).

With `--cold` the caches are emptied where backward begins and where it ends, in every variant, and the time that takes is
left out: a reducer works once at each end of a pass, and in real training finds there what forward and backward have left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _spread import ratio_of_medians, spread
from torch import nn

import phalanx as px
from phalanx.api.replica import replica_of

TorchDDP = torch.nn.parallel.DistributedDataParallel
WARM_UP = 8
EVICTED_BYTES = 64 << 20


def _replicate(module: nn.Module) -> nn.Module:
    made = px.replicate(module)
    replica_of(made).reducer.communicate_alone()
    return made


def _ddp(module: nn.Module) -> nn.Module:
    made = px.DistributedDataParallel(module, gradient_as_bucket_view=True)
    made._engine.communicate_alone()
    made._broadcasts_alone = True
    return made


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "torch": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "replicate": _replicate,
    "our DDP": _ddp,
}


class Eviction:
    """Writes through more memory than the caches hold, and counts how long that took."""

    def __init__(self) -> None:
        self._memory = torch.zeros(EVICTED_BYTES, dtype=torch.uint8)
        self.seconds = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        self._memory.add_(1)
        self.seconds += time.perf_counter() - began


class EvictInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eviction: Eviction) -> torch.Tensor:
        ctx.eviction = eviction
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.eviction.run()
        return gradient, None


class Chain(nn.Module):
    """Layers one after the other, with nothing to compute."""

    def __init__(self, num_parameters: int, eviction: Eviction | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_parameters // 2))
        self.eviction = eviction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == 0 and self.eviction is not None:
                x = EvictInBackward.apply(x, self.eviction)
        return x if self.eviction is None else EvictInBackward.apply(x, self.eviction)


def measure(num_parameters: int, *, num_rounds: int, cold: bool) -> dict[str, Any]:
    eviction = Eviction() if cold else None
    modules = {variant: wrap(Chain(num_parameters, eviction)) for variant, wrap in VARIANTS.items()}
    x = torch.randn(1, 8)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    order = list(VARIANTS)
    gc.collect()
    gc.disable()  # its pauses are longer than what is measured
    for round_ in range(WARM_UP + num_rounds):
        random.shuffle(order)
        for variant in order:
            module = modules[variant]
            before = 0.0 if eviction is None else eviction.seconds
            began = time.perf_counter()
            module.zero_grad()  # where the bare module lets its gradients go; a reducer does so in backward
            module(x).sum().backward()
            took = time.perf_counter() - began - (0.0 if eviction is None else eviction.seconds - before)
            if round_ >= WARM_UP:
                times[variant].append(took * 1e6)
        if round_ % 50 == 0:
            gc.collect()
    gc.enable()
    extra = {v: [a - b for a, b in zip(times[v], times["bare"], strict=True)] for v in VARIANTS}
    return {
        "parameters": num_parameters,
        "rounds": num_rounds,
        "cold": cold,
        "us": {variant: statistics.median(values) for variant, values in times.items()},
        "added us": {variant: vars(spread(extra[variant])) for variant in VARIANTS},
        "of torch's": {v: vars(ratio_of_medians(extra[v], extra["torch"])) for v in VARIANTS},
    }


def show(result: dict[str, Any]) -> None:
    caches = "cold" if result["cold"] else "warm"
    about = f"{result['rounds']} rounds, {caches} caches; zero_grad, forward and backward, median"
    print(f"\n{result['parameters']} parameters, {about}")
    for variant in VARIANTS:
        added, ratio = result["added us"][variant], result["of torch's"][variant]
        line = f"  {variant:10} {result['us'][variant]:9.0f} us"
        if variant != "bare":
            line += f"  adds {added['median']:7.0f} [{added['low']:.0f}, {added['high']:.0f}]"
            line += f", {added['median'] / result['parameters']:.2f} a parameter"
        if variant not in ("bare", "torch"):
            line += f"   {ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}] of torch's"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few rounds: that it runs, not what it measures")
    parser.add_argument("--parameters", default="150,1000,5000")
    parser.add_argument("--steps", type=int, default=200_000, help="times parameters, per variant")
    parser.add_argument("--cold", action="store_true", help="empty the caches where backward begins and ends")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = []
        for number in map(int, arguments.parameters.split(",")):
            rounds = 5 if arguments.quick else min(600, arguments.steps // number)
            results.append(measure(number, num_rounds=rounds, cold=arguments.cold))
            show(results[-1])
        dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
