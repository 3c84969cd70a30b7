"""Typed records of what Phalanx does, for whoever wants to listen: diagnosis, tests, progress displays.

`emit` is called through the idiom ``if events.listeners: events.emit(…)``: with nobody listening a record is not even
made. Listeners run in the thread that emits, in the middle of a step; they must be quick and must not raise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """What every record has: the replicated module, its step (from 1), and the monotonic time in seconds."""

    module: str
    step: int
    at_s: float = field(default_factory=time.perf_counter, kw_only=True)


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """The first gradient of a backward pass that will synchronise has arrived."""


@dataclass(frozen=True, slots=True)
class GradientReady(Event):
    parameter: str
    bucket: int


@dataclass(frozen=True, slots=True)
class BucketLaunched(Event):
    bucket: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BucketReduced(Event):
    """This rank has waited for the bucket's reduction; `waited_s` is how long it stood still for it."""

    bucket: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class BucketsPlanned(Event):
    """Buckets were laid out: at construction, after the first step, or because the parameters changed."""

    reason: str
    num_buckets: int


@dataclass(frozen=True, slots=True)
class StepFinalized(Event):
    """Gradients are averaged. `unused` names the parameters that no rank used, `waited_s` is the wait in all."""

    waited_s: float
    unused: tuple[str, ...] = ()


Listener = Callable[[Event], None]
listeners: tuple[Listener, ...] = ()


def emit(event: Event) -> None:
    for listener in listeners:
        listener(event)


def listen(listener: Listener) -> Callable[[], None]:
    """Start listening; the returned function stops it. A step under way may be seen from its next event on only."""
    global listeners
    listeners = (*listeners, listener)

    def stop() -> None:
        global listeners
        listeners = tuple(other for other in listeners if other is not listener)

    return stop


@contextmanager
def recorded() -> Iterator[list[Event]]:
    """The events of a block, in order."""
    seen: list[Event] = []
    stop = listen(seen.append)
    try:
        yield seen
    finally:
        stop()
