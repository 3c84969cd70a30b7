"""Waiting on the host for a device, where a peer that is gone would make it wait for ever.

Collectives on NCCL are waited for by streams, so a rank that reads what they have left waits within CUDA, where nobody can
wake it. Here it asks whether the device has come so far, and looks now and then whether it ever will.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

SPIN_S = 0.001  # most waits are over by then, and a pause would make them longer
PAUSE_S = 0.0001
LOOK_EVERY_S = 0.2
GRACE_S = 0.5


class Event(Protocol):
    """What a device comes to: `torch.cuda.Event`, or a number that it puts into the host's memory."""

    def query(self) -> bool: ...


def await_event(event: Event, look: Callable[[], None]) -> None:
    """Return when the device has come to the event. `look` is called now and then; it raises where that never will be."""
    if event.query():
        return
    began = looked = time.monotonic()
    while not event.query():
        now = time.monotonic()
        if now - began > SPIN_S:
            time.sleep(PAUSE_S)
        if now - looked > LOOK_EVERY_S:
            _look_around(event, look)
            looked = time.monotonic()


def _look_around(event: Event, look: Callable[[], None]) -> None:
    """A peer that has left may have done so when its part was over: what it has sent may still come."""
    try:
        look()
    except Exception:
        until = time.monotonic() + GRACE_S
        while not event.query():
            if time.monotonic() > until:
                raise
            time.sleep(PAUSE_S)


def await_stream(device: torch.device, look: Callable[[], None]) -> None:
    """Likewise, of all that is queued on the device's current stream."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    await_event(event, look)


def check_device(device: torch.device) -> None:
    """Raise what has gone wrong on a device: after an assertion in a kernel, say, it does nothing, and only CUDA tells."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: nothing may be read from the device, and what is queued is only noted."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():  # torch asks the current device alone
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
