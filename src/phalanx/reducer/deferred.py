"""A step's report on a device: read without making the host wait, when the next step begins.

On the CPU a reduced bucket can be looked at as soon as it was waited for. On a GPU its last numbers are there only when
the device comes to them, and looking at them would stop the host until then, in every step. Nearly always they say
what this rank expects: that all went well, everywhere. So a rank with nothing unusual to tell goes on as if it had read
that, has the numbers copied to the host behind the reduction, and reads them before its next step sends anything.

Whether they are there the numbers say themselves: until one comes, what lies in its place is none. An event would say it,
too, but recording one and asking for it are calls of CUDA in every step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from phalanx.comm.device_wait import await_event, check_device
from phalanx.comm.lookout import Mark
from phalanx.reducer.unused import ControlBlock, Report


class DeferredReport:
    """The control block of one step on its way to the host. Kept with a layout, and used for step after step."""

    def __init__(self, control: ControlBlock, tensor: torch.Tensor) -> None:
        self._control = control
        self._device = tensor.device
        self._make_place(tensor)
        self._averaged = False
        self._num_written = 0

    def _make_place(self, tensor: torch.Tensor) -> None:
        self._numbers = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        self._mark = Mark(self._numbers)
        self._is_under_way = False  # as far as is known

    def start(self, tensor: torch.Tensor, *, averaged: bool) -> None:
        """Copy behind what is queued on the current stream."""
        if self._is_under_way and not self.query():  # nobody has waited for it: it may come at any time
            turn = self._mark.turn
            self._make_place(tensor)
            self._mark.turn = turn
        self._averaged, self._num_written = averaged, self._control.num_written
        self._is_under_way = True
        self._mark.clear()
        self._numbers.copy_(tensor, non_blocking=tensor.is_cuda)

    @property
    def turn(self) -> int:
        return self._mark.turn

    def is_over(self) -> bool:
        """Whether the device has come so far. Asked by any thread."""
        return self._mark.is_over()

    def is_usual(self) -> bool:
        """Whether all numbers are there, and say that no rank has anything to tell."""
        usual = self._control.is_usual(self._numbers, self._num_written)
        self._is_under_way = self._is_under_way and not usual
        return usual

    def query(self) -> bool:
        """Whether every number is there: who reads them needs all, in whichever order they come."""
        return self.is_usual() or (self._mark.is_over() and not bool(torch.isnan(self._numbers).any()))

    def wait(self, look: Callable[[], None]) -> None:
        """Return when the copy is there, as it has been for long in most cases.

        `look` is called now and then while it is not; it raises where it never will be. So does CUDA, where the device has
        failed.
        """

        def look_at_all() -> None:
            check_device(self._device)
            look()

        if not self.is_usual():  # the device may not have come so far; or never will, where a rank is gone
            await_event(self, look_at_all)
        self._is_under_way = False

    def read(self) -> Report | None:
        """What has come, after `wait`; None where no rank has anything to tell."""
        if self.is_usual():
            return None
        return self._control.read(self._numbers.tolist(), averaged=self._averaged)
