"""What ranks with data say to those without, before each collective of a layer: one number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]

LISTENING = 0
"""This rank has no data. Where every rank says so, nothing more is to come."""
UNKNOWN_LAYER = -1
"""A layer that ranks without data cannot know: the rank raises, and they must not wait."""


@dataclass(frozen=True)
class Word:
    """The next collective: whose, which way, and in float64 (`wide`) or float32."""

    direction: Direction
    layer: int
    wide: bool

    def encode(self) -> int:
        return 1 + 4 * self.layer + 2 * (self.direction == "backward") + self.wide

    @classmethod
    def decode(cls, number: int) -> Word:
        assert number > 0
        layer, rest = divmod(number - 1, 4)
        return cls("backward" if rest >= 2 else "forward", layer, bool(rest % 2))

    @classmethod
    def shown(cls, number: int) -> str:
        if number == LISTENING:
            return "has no data left"
        if number == UNKNOWN_LAYER:
            return "is in a layer that not every rank knows"
        word = cls.decode(number)
        return f"is in the {word.direction} pass of layer number {word.layer + 1}"
