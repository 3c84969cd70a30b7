"""A call in torch's profiler: `phalanx:<op>` with its input shapes, from the call to its end on another thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _autograd


class Span:
    """Open from construction until `end`, which any thread may call.

    The record ends in a future's callback: that carries the profiler's thread-local state over to the thread that
    completes it. A record that is simply closed on another thread counts as unfinished and lasts until the trace ends.
    """

    __slots__ = ("_ended", "_future")

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        handle = _autograd._record_function_with_args_enter(name, *inputs)
        self._future: Any = torch.futures.Future()
        self._ended = torch.ops.profiler._call_end_callbacks_on_jit_fut(handle, self._future)

    def end(self) -> None:
        self._future.set_result(None)


def open_span(name: str, inputs: Sequence[object]) -> Span | None:
    """None when nobody profiles."""
    if not _autograd._profiler_enabled():
        return None
    return Span(name, [t for t in inputs if isinstance(t, Tensor)])
