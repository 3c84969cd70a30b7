"""Somebody who looks around while the host waits within CUDA, where nobody can wake it.

Collectives on NCCL are waited for by streams. If a peer is gone, or has failed before it took its part, the device waits
for it in vain, and then so does whoever waits for the device: `loss.item()`, say, until NCCL's own time-out ten minutes
later. A thread of its own asks now and then whether what was queued is over. Where it is not, it looks at the board, and
where that says that it never will be, it gives the group up: its communicator is aborted, so that the device goes on, and
whatever is asked of the group from then on raises the cause.

    queued → (over: nothing to do) | not over → look at the board → a cause → the same a moment later → given up
           → still not over: what a communication hook has sent on another group, say → so are those with the same ranks

Until a communicator is aborted the thread takes no lock that is not its own, also not that of logging: who waits for the
device may hold it, as the text of a log record is made under it.

Asking is reading a number in the host's memory that the device puts there (`Mark`). No call of CUDA: one in another thread
may spoil the capture of a graph, or wait for a lock that is held by who waits for the device.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.comm.group import Queued
from phalanx.errors import PhalanxError

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
# Who has failed may have sent before what is waited for, and it is still on its way. Who is dead sends nothing any more.
GRACE_S = 3.0
GOES_ON_WITHIN_S = 3.0  # a device whose communicator was aborted, unless it has something else to do
MOST_MARKS = 8  # to a device
_NUMBERS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


class Mark:
    """Numbers that a device puts into the host's memory when it comes to it, at which any thread may look."""

    def __init__(self, numbers: torch.Tensor) -> None:
        """They are in pinned memory. What comes to lie there is finite."""
        self._kept = numbers
        number, address = _NUMBERS[numbers.dtype], numbers.data_ptr()
        self._bytes = (ctypes.c_char * numbers.nbytes).from_address(address)
        self._none_there = b"\xff" * numbers.nbytes  # each is NaN
        self._last = number.from_address(address + numbers.nbytes - ctypes.sizeof(number))
        self.turn = 0
        """How often it was queued."""

    def clear(self) -> None:
        """Call before it is queued that the numbers come."""
        self.turn += 1
        self._bytes.raw = self._none_there

    def is_over(self) -> bool:
        """Whether the device has come so far: the last number is there. Others of them may come a moment later."""
        return not math.isnan(self._last.value)


class OwnMark(Mark):
    """A mark with nothing else to carry: zero."""

    def __init__(self, device: torch.device) -> None:
        self.queued_topics: Collection[str] = ()
        with torch.inference_mode(False):  # it is used outside of it, too
            self._zero = torch.zeros(1, device=device)
            number = torch.zeros(1, device="cpu", pin_memory=device.type == "cuda")
        super().__init__(number)

    def queue(self, topics: Collection[str]) -> None:
        """It is over when the current stream has come so far."""
        self.queued_topics = topics
        self.clear()
        self._kept.copy_(self._zero, non_blocking=True)


class Marks:
    """Marks of one device. One that is still to come is not queued again: the device would come to the first, and seem to
    have come to the last."""

    def __init__(self, device: torch.device, watch: Callable[[OwnMark], None]) -> None:
        self._device = device
        self._watch = watch
        self._made: list[OwnMark] = []

    def queue(self, topics: Collection[str]) -> None:
        free = next((mark for mark in self._made if mark.is_over()), None)
        if free is None:
            if len(self._made) == MOST_MARKS:
                return  # those that are still to come are watched; when they are over, there is another time
            free = OwnMark(self._device)
            self._made.append(free)
            self._watch(free)
        free.queue(topics)


class Watched(Protocol):
    """A group, as far as the lookout is concerned."""

    rank: int
    name: str

    def queued(self) -> list[Queued]: ...
    @property
    def is_given_up(self) -> bool: ...
    @property
    def is_closed(self) -> bool: ...
    def check_notices(self, also: Collection[str] = ()) -> None: ...
    def is_beyond_doubt(self, error: PhalanxError) -> bool: ...
    def give_up(self, cause: PhalanxError) -> None: ...
    def give_up_others(self) -> None:
        """Likewise, and for the same cause, other groups of ranks that are the cause."""


@dataclass
class _Finding:
    """Why something may never be over, and since when the same is not."""

    cause: PhalanxError
    since: float
    waited_for: list[tuple[int, int]]


class Lookout:
    """The thread, and the groups that it looks after. It runs while there are any."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._found: weakref.WeakKeyDictionary[Watched, _Finding] = weakref.WeakKeyDictionary()
        self._given_up: weakref.WeakKeyDictionary[Watched, float] = weakref.WeakKeyDictionary()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()

    def watch(self, group: Watched) -> None:
        """Look after this group from now on, until it is closed or gone."""
        with self._changing:
            self._groups.add(group)
            if self._thread is None and not self._ends.is_set():
                self._thread = threading.Thread(target=self._run, name="phalanx-lookout", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Return when it no longer looks."""
        self._ends.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def look(self) -> None:
        """At every group, once."""
        with self._changing:
            groups = list(self._groups)
        for group in groups:
            try:
                self._look_at(group)
            except Exception as error:  # the others are still to be looked at
                logger.debug("rank %d could not look after group %s: %s", group.rank, group.name, error)

    def _run(self) -> None:
        while not self._ends.wait(LOOK_EVERY_S):
            self.look()
            with self._changing:
                if not self._groups:
                    self._thread = None
                    return

    def _look_at(self, group: Watched) -> None:
        # Of what is over, others may have said that they failed in it, too, and gone on.
        waited_for = [one for one in group.queued() if not one.is_over()]
        is_over = group.is_closed or not waited_for
        if group.is_given_up or group.is_closed:
            self._look_back_at(group, is_over=is_over)
            return
        if is_over:
            self._found.pop(group, None)
            return
        try:
            group.check_notices(also={topic for one in waited_for for topic in one.queued_topics})
        except PhalanxError as cause:
            self._consider(group, cause, [(id(one), one.turn) for one in waited_for])
        else:
            self._found.pop(group, None)

    def _consider(self, group: Watched, cause: PhalanxError, waited_for: list[tuple[int, int]]) -> None:
        found = self._found.get(group)
        if found is None or found.waited_for != waited_for:  # while one step after the other is over, nothing is amiss
            self._found[group] = _Finding(cause, time.monotonic(), waited_for)
        elif group.is_beyond_doubt(found.cause) or time.monotonic() - found.since > GRACE_S:
            group.give_up(found.cause)

    def _look_back_at(self, group: Watched, *, is_over: bool) -> None:
        """Nothing more is queued on it."""
        since = self._given_up.setdefault(group, time.monotonic())
        is_late = not is_over and time.monotonic() - since > GOES_ON_WITHIN_S
        if is_late:
            group.give_up_others()
        if is_over or is_late:
            with self._changing:
                self._groups.discard(group)


_lookout = Lookout()
_of_process = os.getpid()


def watch(group: Watched) -> None:
    """Look after this group from now on, until it is closed or gone."""
    global _lookout, _of_process
    if _of_process != os.getpid():  # a fork has no threads
        _lookout, _of_process = Lookout(), os.getpid()
    _lookout.watch(group)


def _end() -> None:
    if _of_process == os.getpid():
        _lookout.end()


atexit.register(_end)
