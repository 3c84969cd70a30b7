"""Tensors that are spread over ranks of another axis, as DTensors are: of such a parameter each rank holds a part.

Gradients are averaged between ranks that hold the same part. So the reducer deals with parts: they lie in buckets, and
are shown to the user as what they are parts of. Which types these are it does not know; who does registers a `Spread`.
A plain tensor is its own part, and none of this is asked for it but once, when its slot is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Spread(Protocol):
    """One type of spread tensors."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is of this type."""

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part: its memory itself, not a copy."""

    def like(self, part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """What `part` is this rank's part of, spread as `whole` is. No rank communicates."""

    def fitted(self, gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """A gradient spread as its parameter is: itself, or what the ranks that hold its parts make of it together."""

    def described(self, tensor: torch.Tensor) -> str:
        """How the tensor is spread, for the ranks that average it to compare."""

    def problem_with(self, tensor: torch.Tensor, ranks: Sequence[int]) -> str | None:
        """Why these (global) ranks cannot average the tensor: they do not hold the same part of it."""


_known: list[Spread] = []


def register(spread: Spread) -> None:
    """Let the reducer know one more type."""
    if not any(type(known) is type(spread) for known in _known):
        _known.append(spread)


def spread_of(tensor: torch.Tensor) -> Spread | None:
    """How to deal with this tensor; None where it is a plain one."""
    if type(tensor) in _PLAIN:
        return None
    return next((spread for spread in _known if spread.holds(tensor)), None)


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor: the tensor itself where it is a plain one."""
    spread = spread_of(tensor)
    return tensor if spread is None else spread.part(tensor)


def parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if _PLAIN.issuperset(map(type, tensors)):  # as in most models: in C, as it runs for every buffer in every step
        return list(tensors)
    return [part_of(tensor) for tensor in tensors]


def problem_with_spread(named: Sequence[tuple[str, torch.Tensor]], ranks: Sequence[int]) -> ValueError | None:
    """Which of these tensors the ranks cannot average, as the error to raise."""
    for name, tensor in named:
        spread = spread_of(tensor)
        problem = None if spread is None else spread.problem_with(tensor, ranks)
        if problem is not None:
            return ValueError(f"{name} {problem}")
    return None
