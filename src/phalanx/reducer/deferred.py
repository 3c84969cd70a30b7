"""A step's report on a device: read without making the host wait, when the next step begins.

On the CPU a reduced bucket can be looked at as soon as it was waited for. On a GPU its last numbers are there only when
the device comes to them, and looking at them would stop the host until then, in every step. Nearly always they say
what this rank expects: that all went well, everywhere. So a rank with nothing unusual to tell goes on as if it had read
that, has the numbers copied to the host behind the reduction, and reads them before its next step sends anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.comm.device_wait import await_event
from phalanx.comm.lookout import Mark
from phalanx.reducer.streams import stream_object
from phalanx.reducer.unused import ControlBlock, Report


class DeferredReport:
    """The control block of one step on its way to the host. Kept with a layout, and used for step after step."""

    def __init__(self, control: ControlBlock, tensor: torch.Tensor) -> None:
        self._control = control
        self._on_device = tensor.device.type == "cuda"
        self._numbers = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=self._on_device)
        self._copied = torch.cuda.Event() if self._on_device else None
        self._last = Mark(self._numbers[-1:])
        self._averaged = False
        self._num_written = 0

    def start(self, tensor: torch.Tensor, *, averaged: bool) -> None:
        """Copy behind what is queued on the current stream."""
        self._averaged, self._num_written = averaged, self._control.num_written
        self._last.clear()
        self._numbers.copy_(tensor, non_blocking=self._on_device)
        if self._copied is not None:  # in that device's stream: the current device may be another
            self._copied.record(stream_object(tensor.device))

    @property
    def turn(self) -> int:
        return self._last.turn

    def is_over(self) -> bool:
        """Whether the numbers are there. Asked by any thread."""
        return self._last.is_over()

    def wait(self, look: Callable[[], None]) -> None:
        """Return when the copy is there, as it has been for long in most cases.

        `look` is called now and then while it is not; it raises where it never will be.
        """
        if self._copied is not None:  # the device may not have come so far; or never will, where a rank is gone
            await_event(self._copied, look)

    def read(self) -> Report | None:
        """What has come, after `wait`; None where no rank has anything to tell."""
        if self._control.is_usual(self._numbers, self._num_written):
            return None
        return self._control.read(self._numbers.tolist(), averaged=self._averaged)
