"""One training step under torch's profiler: what is reduced while backward still computes, and what the host waits for.

    PYTHONPATH=src python benchmarks/gpu_trace.py [--model gpt] [--svg FILE] [--json FILE] [--world-size 2]

Alone (world size 1, NCCL) it shows the host: when each bucket is launched, and every call in which the host waits for the
device. As two ranks on one GPU (Gloo) it shows the device too: a bucket's copies to and from the host beside backward's
kernels. Without a GPU it traces the CPU, which shows that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parent))

from _gpu_models import TASKS as GPU_TASKS

import phalanx as px
from phalanx.api.replica import replica_of

WARM_UP = 8
PHASES = ("zero_grad", "forward", "backward", "optimizer")
# A host that waits for its device is in one of these. (Waiting for an event in a stream is not: that queues and returns.)
WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
)


@dataclass(frozen=True)
class Span:
    """Something that took time, in ms since the step began."""

    row: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Story:
    """One step, read from a trace."""

    title: str
    phases: dict[str, tuple[float, float]]
    buckets: list[Span]
    reductions: list[Span]
    device: list[Span]
    waits: list[Span]

    @property
    def backward(self) -> tuple[float, float]:
        return self.phases["backward"]

    def launched_during_backward(self) -> list[float]:
        """By bucket: how much of the backward pass was over when it was launched."""
        begin, end = self.backward
        return [(bucket.begin - begin) / (end - begin) for bucket in self.buckets]

    def hidden(self) -> float | None:
        """The share of the time of copies in other streams, which are reductions', during which kernels ran, too."""
        copies = [span for span in self.device if span.row != "kernels" and self._is_reduction(span)]
        kernels = [span for span in self.device if span.row == "kernels"]
        total = sum(span.end - span.begin for span in copies)
        return sum(_overlap(copy, kernels) for copy in copies) / total if total else None

    def _is_reduction(self, span: Span) -> bool:
        return self.backward[0] <= span.begin <= self.phases["optimizer"][0]


def _overlap(span: Span, others: Sequence[Span]) -> float:
    """How long of `span` some of the others ran. They may overlap each other: their union counts."""
    covered, reached = 0.0, span.begin
    for other in sorted(others, key=lambda other: other.begin):
        begin, end = max(other.begin, reached), min(other.end, span.end)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def read(trace: dict[str, Any], title: str) -> Story:
    """Make sense of a chrome trace that holds exactly one step."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = [event for event in events if event["name"] in PHASES and event.get("cat") == "user_annotation"]
    # Torch marks backward by that name too, within ours.
    named = {phase: max((e for e in spans if e["name"] == phase), key=lambda e: float(e["dur"])) for phase in PHASES}
    zero = min(float(named[phase]["ts"]) for phase in PHASES)

    def span(row: str, event: dict[str, Any]) -> Span:
        begin = (float(event["ts"]) - zero) / 1e3
        return Span(row, str(event["name"]), begin, begin + float(event.get("dur", 0)) / 1e3)

    last = (float(named["optimizer"]["ts"]) + float(named["optimizer"]["dur"]) - zero) / 1e3
    of_host = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation", "python_function")]
    buckets = [span("buckets", event) for event in of_host if str(event["name"]).startswith("phalanx.bucket")]
    reductions = [
        span("collectives", event)
        for event in of_host
        if str(event["name"]).startswith(("nccl:", "gloo:", "phalanx:"))  # by the backends, in whatever thread
    ]
    of_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    streams = Counter(_stream(event) for event in of_device if event["cat"] == "kernel")
    main = streams.most_common(1)[0][0] if streams else ""
    device = [
        span(
            "kernels" if event["cat"] == "kernel" or _stream(event) == main else f"copies {_stream(event)}",
            event,
        )
        for event in of_device
    ]
    waits = [
        found
        for event in events
        if event.get("cat") == "cuda_runtime" and event["name"] in WAITS
        if 0 <= (found := span("waits", event)).begin <= last
    ]
    phases = {phase: (s.begin, s.end) for phase in PHASES if (s := span("host", named[phase]))}
    return Story(title, phases, sorted(buckets, key=lambda b: b.begin), reductions, device, waits)


def _stream(event: dict[str, Any]) -> str:
    return str(event.get("args", {}).get("stream", ""))


# -- taking the trace --------------------------------------------------------------------------------------------------


def _cpu_task() -> tuple[nn.Module, Any]:
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))
    batch = torch.randn(64, 512)
    return module, lambda module: module(batch).square().mean()


def take(rank: int, model: str, world_size: int, store: str, out: str) -> None:
    on_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    if on_gpu:
        torch.cuda.set_device(0)
    backend = "nccl" if on_gpu and world_size == 1 else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    if on_gpu:
        task = GPU_TASKS[model]()
        module, loss = task.make().cuda(), task.loss
    else:
        module, loss = _cpu_task()
    px.replicate(module, **({} if on_gpu else {"bucket_bytes": 4 << 20}))
    if world_size == 1:
        replica_of(module).reducer.communicate_alone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def step() -> None:
        with record_function("zero_grad"):
            optimizer.zero_grad()
        with record_function("forward"):
            value = loss(module)
        with record_function("backward"):
            value.backward()
        with record_function("optimizer"):
            optimizer.step()

    for _ in range(WARM_UP):
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as warm:  # the profiler's own first use is slow
        step()
    del warm
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=activities) as recorded:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    if rank == 0:
        recorded.export_chrome_trace(out)
    dist.barrier()
    dist.destroy_process_group()


# -- telling and drawing -----------------------------------------------------------------------------------------------

COLOURS = {"host": "#5b7fa6", "buckets": "#c4603c", "collectives": "#d99a2b", "kernels": "#4d8f63", "waits": "#b02a37"}
WIDTH, LEFT, ROW = 1000, 130, 26


def tell(story: Story) -> None:
    print(f"\n{story.title}")
    for phase, (begin, end) in story.phases.items():
        print(f"  {phase:10} {begin:8.2f} to {end:8.2f} ms (host)")
    for bucket, share in zip(story.buckets, story.launched_during_backward(), strict=True):
        print(f"  {bucket.begin:8.2f} ms, {share:4.0%} of backward over: {bucket.name}")
    if (hidden := story.hidden()) is not None:
        print(f"  of the copies to and from the host {hidden:.0%} lie beside kernels")
    print(f"  the host waits for the device {len(story.waits)} times" + "".join(f"\n    {w}" for w in story.waits))


def draw(story: Story) -> str:
    """An SVG: the host's phases, the buckets and collectives, and what the device did, one row each."""
    rows: list[tuple[str, list[Span]]] = [
        ("host", [Span("host", phase, *span) for phase, span in story.phases.items()]),
        ("buckets", story.buckets),
        ("collectives", story.reductions),
        ("waits", story.waits),
    ]
    for name in sorted({span.row for span in story.device}, key=lambda name: (name != "kernels", name)):
        rows.append((name, [span for span in story.device if span.row == name]))
    rows = [(name, spans) for name, spans in rows if spans or name == "waits"]
    last = max(span.end for _, spans in rows for span in spans)
    scale = (WIDTH - LEFT - 10) / last
    height = ROW * len(rows) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="16" font-size="13">{_text(story.title)}</text>',
    ]
    for number, (name, spans) in enumerate(rows):
        y = 26 + ROW * number
        parts.append(f'<text x="8" y="{y + 15}">{_text(name)}{"" if spans else ": none"}</text>')
        for span in spans if name == "host" else _merged(spans, gap=1.0 / scale):
            x, width = LEFT + span.begin * scale, max((span.end - span.begin) * scale, 0.6)
            colour = COLOURS.get(name, "#8a6fb0")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}">'
                f"<title>{_text(span.name[:90])}: {span.begin:.2f} to {span.end:.2f} ms</title></rect>"
            )
            if name == "host" and width > 40:
                parts.append(f'<text x="{x + 4:.1f}" y="{y + 14}" fill="white">{_text(span.name)}</text>')
    for mark in range(0, int(last) + 1, max(1, int(last / 10))):
        x = LEFT + mark * scale
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" fill="#555">{mark} ms</text>')
    return "\n".join([*parts, "</svg>\n"])


def _merged(spans: Sequence[Span], *, gap: float) -> list[Span]:
    """Spans that are too near to each other to be told apart, as one."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if merged and span.begin - merged[-1].end < gap and merged[-1].row != "buckets":
            last = merged[-1]
            merged[-1] = Span(last.row, last.name, last.begin, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", choices=list(GPU_TASKS))
    parser.add_argument("--world-size", type=int, default=1, choices=[1, 2])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--quick", action="store_true", help="the same; for `make bench`")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/trace.json"
        given = (arguments.model, arguments.world_size, f"{folder}/store", out)
        mp.start_processes(take, given, nprocs=arguments.world_size, start_method="spawn")
        trace = json.loads(Path(out).read_text())
    where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "the CPU"
    ranks = "alone" if arguments.world_size == 1 else "two ranks, Gloo"
    model = arguments.model if torch.cuda.is_available() else "24 linear layers"
    story = read(trace, f"A step of {model} on {where}, {ranks}, torch {torch.__version__}")
    tell(story)
    if arguments.svg:
        arguments.svg.write_text(draw(story))
    if arguments.json:
        arguments.json.write_text(json.dumps({**asdict(story), "hidden": story.hidden()}, indent=1))


if __name__ == "__main__":
    main()
