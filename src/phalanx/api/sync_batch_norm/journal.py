"""Which layers communicated, and in which order, for whoever must repeat it: see `shadow`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

from torch import nn

Direction = Literal["forward", "backward"]
Reader = Callable[[Direction, nn.Module], None]

_readers: list[weakref.WeakMethod[Reader]] = []


def subscribe(reader: Reader) -> Callable[[], None]:
    """Call the method `reader` for each collective, until what is returned is called or the method's object is gone."""
    entry = weakref.WeakMethod(reader, _forget)
    _readers.append(entry)
    return lambda: _forget(entry)


def _forget(entry: weakref.ReferenceType[Reader]) -> None:
    if entry in _readers:
        _readers.remove(entry)  # type: ignore[arg-type]


def note(direction: Direction, layer: nn.Module | None) -> None:
    if _readers and layer is not None:
        for entry in list(_readers):
            reader = entry()
            if reader is not None:
                reader(direction, layer)
