"""What a reducer costs the host, with next to nothing to compute or to send: the part that a fast device makes visible.

    python benchmarks/host_cost.py [--json FILE] [--quick] [--parameters 150,1000,5000]

One process, world size 1 on Gloo with the collectives called all the same, layers of 8 x 8 on the CPU: a step is all host
work, and what a variant adds to the bare step is what its Python or C++ takes. Variants take turns step by step, in random
order. On a GPU the same host work comes on top of launching kernels (`gpu_step.py`).
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
from _alone import communicate_alone
from _spread import ratio_of_medians, spread
from torch import nn

import phalanx as px
from phalanx.api.replicate import replica_of

TorchDDP = torch.nn.parallel.DistributedDataParallel
WARM_UP = 8


def _replicate(module: nn.Module) -> nn.Module:
    made = px.replicate(module)
    communicate_alone(replica_of(made).reducer)
    return made


def _ddp(module: nn.Module) -> nn.Module:
    made = px.DistributedDataParallel(module, gradient_as_bucket_view=True)
    communicate_alone(made._engine)
    return made


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda module: module,
    "torch": lambda module: TorchDDP(module, gradient_as_bucket_view=True),
    "replicate": _replicate,
    "our DDP": _ddp,
}


def chain(num_parameters: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_parameters // 2)))


def measure(num_parameters: int, *, num_rounds: int) -> dict[str, Any]:
    modules = {variant: wrap(chain(num_parameters)) for variant, wrap in VARIANTS.items()}
    x = torch.randn(1, 8)
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    order = list(VARIANTS)
    gc.collect()
    gc.disable()  # its pauses are longer than what is measured
    for round_ in range(WARM_UP + num_rounds):
        random.shuffle(order)
        for variant in order:
            module = modules[variant]
            began = time.perf_counter()
            module.zero_grad()  # where the bare module lets its gradients go; a reducer does so in backward
            module(x).sum().backward()
            if round_ >= WARM_UP:
                times[variant].append((time.perf_counter() - began) * 1e6)
        if round_ % 50 == 0:
            gc.collect()
    gc.enable()
    extra = {v: [a - b for a, b in zip(times[v], times["bare"], strict=True)] for v in VARIANTS}
    return {
        "parameters": num_parameters,
        "rounds": num_rounds,
        "us": {variant: statistics.median(values) for variant, values in times.items()},
        "added us": {variant: vars(spread(extra[variant])) for variant in VARIANTS},
        "of torch's": {v: vars(ratio_of_medians(extra[v], extra["torch"])) for v in VARIANTS},
    }


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['parameters']} parameters, {result['rounds']} rounds; zero_grad, forward and backward, median")
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = []
        for number in map(int, arguments.parameters.split(",")):
            rounds = 5 if arguments.quick else min(600, arguments.steps // number)
            results.append(measure(number, num_rounds=rounds))
            show(results[-1])
        dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
