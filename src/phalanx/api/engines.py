"""The reducers at work in this process, for whoever has to find the one behind a parameter: the compiler does.

What knows the compiler is the compose layer's, which registers itself here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from phalanx.reducer.reducer import Reducer


class Watcher(Protocol):
    """What wants to know of reducers."""

    def made(self) -> None:
        """There is one more."""

    def forward_begins(self) -> None:
        """The forward pass of a DistributedDataParallel is about to run its module."""


_watchers: list[Watcher] = []
_engines: weakref.WeakSet[Reducer] = weakref.WeakSet()


def register(watcher: Watcher) -> None:
    _watchers.append(watcher)


def add(engine: Reducer) -> None:
    """Averages gradients from now on, until it is removed or gone."""
    _engines.add(engine)
    for watcher in _watchers:
        watcher.made()


def remove(engine: Reducer) -> None:
    _engines.discard(engine)


def end() -> None:
    """The job ends: hear what was said of each one's last step."""
    for engine in list(_engines):
        engine.hear_the_last()


def forward_begins() -> None:
    for watcher in _watchers:
        watcher.forward_begins()


def any_at_work() -> bool:
    return bool(_engines)


def find(tensors: Iterable[torch.Tensor]) -> dict[int, Reducer]:
    """Of these tensors, by id, those that are parameters of a reducer."""
    wanted = {id(tensor) for tensor in tensors}
    return {
        id(parameter): engine
        for engine in list(_engines)
        for slot in engine.slots
        if (parameter := slot.ref()) is not None and id(parameter) in wanted
    }


def in_bucket(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether this gradient of a parameter lies in the memory of a bucket."""
    return any(slot.shown is gradient for engine in list(_engines) for slot in engine.slots if slot.ref() is parameter)
