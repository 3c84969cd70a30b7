"""Which layers communicated, and in which order, for whoever must repeat it: see `shadow`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

from torch import nn

Direction = Literal["forward", "backward"]
Reader = Callable[[Direction, nn.Module], None]

_readers: weakref.WeakSet[object] = weakref.WeakSet()


class Reading:
    """A reader's subscription; it ends with `close`, or when it is collected."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        _readers.add(self)

    def close(self) -> None:
        _readers.discard(self)


def note(direction: Direction, layer: nn.Module | None) -> None:
    if _readers and layer is not None:
        for reading in list(_readers):
            assert isinstance(reading, Reading)
            reading.reader(direction, layer)
