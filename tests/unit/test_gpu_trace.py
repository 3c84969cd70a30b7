"""benchmarks/gpu_trace.py reads a trace rightly: what it says of overlap and of waits goes into the documentation."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_trace.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_trace", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_trace"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    yield module
    del sys.modules["gpu_trace"]


def event(name: str, cat: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": 1e3 * (100 + begin), "dur": 1e3 * (end - begin), "args": args}


TRACE = {
    "traceEvents": [
        event("zero_grad", "user_annotation", 0, 1),
        event("forward", "user_annotation", 1, 10),
        event("backward", "user_annotation", 10, 30),
        event("optimizer", "user_annotation", 30, 32),
        event("backward", "user_annotation", 10, 10.001),  # torch's own mark, within
        event("backward", "gpu_user_annotation", 12, 40, stream=7),
        event("phalanx.bucket Net #0 (last)", "cpu_op", 15, 16),
        event("phalanx.bucket Net #1 (first)", "cpu_op", 29, 30),
        event("gemm", "kernel", 12, 20, stream=7),
        event("gemm", "kernel", 18, 24, stream=7),
        event("Memcpy DtoH", "gpu_memcpy", 16, 22, stream=9),  # wholly beside kernels
        event("Memcpy HtoD", "gpu_memcpy", 23, 29, stream=9),  # 1 of 6 ms beside one
        event("Memcpy HtoD", "gpu_memcpy", 2, 5, stream=7),  # the batch: no reduction
        event("cudaStreamSynchronize", "cuda_runtime", 25, 26),
        event("cudaStreamWaitEvent", "cuda_runtime", 26, 27),
        event("cudaDeviceSynchronize", "cuda_runtime", 33, 40),  # after the step
        {"ph": "M", "name": "process_name"},
    ]
}


def test_reading(script: Any) -> None:
    story = script.read(TRACE, "a step")
    assert story.backward == (10, 30)
    assert story.launched_during_backward() == [0.25, 0.95]
    assert [wait.name for wait in story.waits] == ["cudaStreamSynchronize"]
    assert story.hidden() == pytest.approx(7 / 12)


def test_drawing(script: Any) -> None:
    drawn = script.draw(script.read(TRACE, "a <step> & more"))
    assert "a &lt;step&gt; &amp; more" in drawn
    # Phases, buckets, the wait; the batch's copy and the kernels, which touch and are drawn as one; the reduction's copies.
    assert drawn.count("<title>") == 4 + 2 + 1 + 2 + 2
    assert drawn.count("<rect") == 1 + drawn.count("<title>")
