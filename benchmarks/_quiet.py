"""A core of one's own, as far as that goes: on a machine that others use too, some cores are half as fast as others."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress


def stay_on_the_quietest_core() -> int | None:
    """Try all cores that this process may use, and keep all its threads on the best. None where that cannot be done.

    A training step loses nothing: of its two threads, the caller's and autograd's, one waits while the other works.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    took: dict[int, list[float]] = {core: [] for core in cores}
    for _ in range(3):
        for core in cores:
            os.sched_setaffinity(0, {core})
            took[core] += [_some_work() for _ in range(4)]
    quietest = min(cores, key=lambda core: (statistics.median(took[core]), max(took[core])))
    _move_all({quietest})
    return quietest


def use_all_cores() -> None:
    if hasattr(os, "sched_setaffinity"):
        _move_all(set(range(os.cpu_count() or 1)))


def _move_all(cores: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def _some_work() -> float:
    began = time.perf_counter()
    table = {number: str(number) for number in range(4000)}
    sum(len(text) for text in table.values())
    return time.perf_counter() - began
