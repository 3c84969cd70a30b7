"""How much of the communication a compiled transformer hides behind backward: torch's DDP and Phalanx, on two ranks.

    python benchmarks/compile_overlap.py [--json FILE] [--quick] [--backend NAME]

Torch's DDP splits the compiled graph by its DDPOptimizer, Phalanx by its own buckets; both have the same caps. A round is
one step of every variant, in an order that alternates. Communication lasts from the first bucket's launch to the last
one's end, and is hidden as long as backward computes:

    share hidden = (end of backward's computation - first launch) / (end of the last reduction - first launch)

as torch's DDP reports it of itself (`backward_compute_comm_overlap_time / backward_comm_time`), and the reducer's own times
for Phalanx. `whole` is Phalanx with `optimize_ddp = False`: what the split is worth.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from _spread import paired_ratio, spread
from _two_ranks import run_as_two_ranks
from torch import nn
from torch.nn import functional as F

import phalanx as px

TorchDDP = torch.nn.parallel.DistributedDataParallel
CAP_MB = 4
WARM_UP_ROUNDS = 3
VOCABULARY, WIDTH, NUM_LAYERS, TOKENS = 2000, 256, 6, 384


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(NUM_LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


Share = Callable[[], float]


@dataclass(frozen=True)
class Variant:
    step: Callable[[], None]
    share: Share
    """Of the last step."""


def torch_share(ddp: TorchDDP) -> float:
    ddp.logger.set_runtime_stats_and_log()  # as its next forward would
    data = ddp._get_ddp_logging_data()
    return data["backward_compute_comm_overlap_time"] / data["backward_comm_time"]


def our_share(module: nn.Module) -> float:
    times = px.step_stats(module).times
    return (times.backward_end_ns - times.first_launch_ns) / (times.finalized_ns - times.first_launch_ns)


def make_variants(backend: str) -> dict[str, Variant]:
    """A step is without its optimizer: that is alike, and nothing is hidden behind it."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS + 1))

    def step_of(model: nn.Module, module: nn.Module, optimize: bool = True) -> Callable[[], None]:
        def step() -> None:
            for parameter in module.parameters():
                parameter.grad = None
            with torch._dynamo.config.patch(optimize_ddp=optimize):
                logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

        return step

    def compiled(wrapped: nn.Module) -> nn.Module:
        # A backend of its own: modules of one class share compiled code otherwise, and so the first one's split.
        compiler = torch._dynamo.lookup_backend(backend)
        made: nn.Module = torch.compile(wrapped, backend=lambda graph, inputs: compiler(graph, inputs))
        return made

    theirs, replicated, whole, ours = Decoder(), Decoder(), Decoder(), Decoder()
    ddp = TorchDDP(theirs, bucket_cap_mb=CAP_MB)
    ddp._set_ddp_runtime_logging_sample_rate(1)
    our_ddp = px.DistributedDataParallel(ours, bucket_cap_mb=CAP_MB)
    for module in (replicated, whole):
        px.replicate(module, bucket_bytes=CAP_MB << 20)
    return {
        "torch": Variant(step_of(compiled(ddp), theirs), lambda: torch_share(ddp)),
        "phalanx": Variant(step_of(compiled(replicated), replicated), lambda: our_share(replicated)),
        "phalanx_ddp": Variant(step_of(compiled(our_ddp), ours), lambda: our_share(our_ddp)),
        "whole": Variant(step_of(compiled(whole), whole, optimize=False), lambda: our_share(whole)),
    }


def measure(backend: str, num_rounds: int) -> dict[str, Any]:
    """Seconds (the slower rank's) and shares (the ranks' mean), by variant and round."""
    variants = make_variants(backend)
    times: dict[str, list[float]] = {name: [] for name in variants}
    shares: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(WARM_UP_ROUNDS + num_rounds):
        for name in list(variants) if number % 2 else list(reversed(variants)):
            gc.collect(0)
            dist.barrier()
            began = time.perf_counter()
            variants[name].step()
            took = time.perf_counter() - began
            if number >= WARM_UP_ROUNDS:
                times[name].append(took)
                shares[name].append(variants[name].share())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (times, shares))
    names = list(variants)
    return {
        "times": {n: [max(pair) for pair in zip(*(t[n] for t, _ in everyone), strict=True)] for n in names},
        "shares": {n: [sum(pair) / 2 for pair in zip(*(s[n] for _, s in everyone), strict=True)] for n in names},
    }


def run_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.store}", rank=arguments.rank, world_size=2)
    found = measure(arguments.backend, arguments.rounds)
    if arguments.rank == 0:
        Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def run(backend: str, num_rounds: int) -> dict[str, Any]:
    return run_as_two_ranks(__file__, ["--rounds", str(num_rounds), "--backend", backend])


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """Shares by round, and how much larger ours is than torch's in the same round."""
    times, shares = found["times"], found["shares"]
    ours = [name for name in times if name != "torch"]
    return {
        "medians_ms": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "hidden": {name: asdict(spread(values)) for name, values in shares.items()},
        "more_than_torch": {
            name: asdict(spread([own - theirs for own, theirs in zip(shares[name], shares["torch"], strict=True)]))
            for name in ours
        },
        "step_over_torch": {name: asdict(paired_ratio(times[name], times["torch"])) for name in ours},
    }


def show(verdict: dict[str, Any]) -> None:
    print("medians in ms:", "  ".join(f"{name} {value:.1f}" for name, value in verdict["medians_ms"].items()))
    rows = {"hidden": "share hidden", "more_than_torch": "more hidden than torch", "step_over_torch": "step / torch's"}
    for key, title in rows.items():
        for name, value in verdict[key].items():
            print(f"    {title}, {name:12} {value['median']:.3f}  95 % [{value['low']:.3f}, {value['high']:.3f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="few rounds, no inductor: shows that it runs")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    for hidden in ("--store", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments)
        return
    backend = "aot_eager" if arguments.quick else arguments.backend
    verdict = judge(run(backend, 4 if arguments.quick else arguments.rounds))
    print(f"decoder of {NUM_LAYERS} layers, compiled by {backend}, buckets of {CAP_MB} MiB, two ranks on Gloo")
    show(verdict)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"torch": torch.__version__, "backend": backend, **verdict}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
