"""What a rank says of itself beside its statistics, so that ranks which disagree find out instead of waiting or mixing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NO_OPINION = -1
"""The layer, dimensions or dtype of a rank that has no samples: it agrees with whatever the others have."""

_COUNT_BASE = 1 << 20  # a float32 holds integers up to 2**24 only: a count travels in two lanes


class Grads(IntFlag):
    """What of this forward autograd will come back for."""

    NONE = 0
    SOME = 1
    INPUT = 2


@dataclass(frozen=True)
class Header:
    """One rank's part in a forward pass of one layer. All ranks of the group must say the same, but for the count."""

    count: int
    layer: int = NO_OPINION
    ndim: int = NO_OPINION
    dtype: int = NO_OPINION
    grads: Grads = Grads.NONE
    failed: bool = False
    shadow: bool = False

    LANES = 8

    def encode(self) -> list[float]:
        high, low = divmod(self.count, _COUNT_BASE)
        return [high, low, self.layer, self.ndim, self.dtype, int(self.grads), self.failed, self.shadow]

    @classmethod
    def decode(cls, lanes: Sequence[float]) -> Header:
        high, low, layer, ndim, dtype, grads, failed, shadow = (int(lane) for lane in lanes)
        return cls(high * _COUNT_BASE + low, layer, ndim, dtype, Grads(grads), bool(failed), bool(shadow))


def first_difference(headers: Sequence[Header]) -> str | None:
    """The first thing that ranks of a group, in their order, do not agree on, as a sentence; None where they do."""
    for name, said in (("layer", _layer), ("ndim", _dimensions), ("dtype", _dtype)):
        opinions = [(rank, getattr(h, name)) for rank, h in enumerate(headers) if getattr(h, name) != NO_OPINION]
        for rank, opinion in opinions:
            if opinion != opinions[0][1]:
                return f"rank {opinions[0][0]} {said(opinions[0][1])} and rank {rank} {said(opinion)}"
    if any(header.grads & Grads.INPUT for header in headers):
        for rank, header in enumerate(headers):
            if header.grads == Grads.NONE and not header.shadow:
                other = next(r for r, h in enumerate(headers) if h.grads & Grads.INPUT)
                return (
                    f"rank {other} records gradients and rank {rank} does not (torch.no_grad, or an input and parameters "
                    f"that need none): rank {other}'s backward would wait for it"
                )
    return None


def _layer(index: int) -> str:
    return f"is in the layer that was number {index + 1} to be used"


def _dimensions(ndim: int) -> str:
    return f"has an input of {ndim} dimensions"


def _dtype(index: int) -> str:
    return f"has one of {DTYPES[index]}"
