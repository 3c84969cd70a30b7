"""The order of an epoch, and one rank's share of what is left of it. Pure: numbers in, numbers out.

All ranks walk one global order together: with `world_size` ranks and `start` samples used before, rank r takes the
positions start + r, start + r + world_size, and so on. When every rank has used k samples, the first
start + k * world_size of the order are used and no others, so a single number says where the epoch stands, and a world of
another size can go on from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Tail = Literal["pad", "drop", "keep"]
"""What happens when the rest of an epoch does not divide evenly: samples from the order's beginning fill it up, it is
dropped, or some ranks get one sample more than others."""


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor | None:
    """The dataset's indices in the order of this epoch, the same as torch's sampler uses; None for 0, 1, 2 …"""
    if not shuffle:
        return None
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator, device="cpu")


@dataclass(frozen=True)
class Share:
    """What one rank draws of an epoch from position `start` on."""

    length: int
    start: int
    world_size: int
    rank: int
    tail: Tail

    @property
    def count(self) -> int:
        left = self.length - self.start
        if self.tail == "pad":
            return -(-left // self.world_size)
        if self.tail == "drop":
            return left // self.world_size
        return len(self._own_positions())

    def position_after(self, num_used: int) -> int:
        """How much of the order is used once every rank has used `num_used` samples of its share."""
        if num_used >= self.count > 0 and self.tail == "drop":
            return self.length  # what is left is what gets dropped
        return min(self.length, self.start + num_used * self.world_size)

    def parts(self, order: torch.Tensor | None, *, most: int) -> Iterator[Sequence[int]]:
        """The indices of this share, in turn, in pieces of at most `most` where they must be held in memory."""
        own, padding = self._own_positions(), self._padding(order)
        if order is None:
            pieces: Iterator[Sequence[int]] = iter((own,) if len(own) else ())
        else:
            # A copy of the strided part alone, so that the whole order is freed while the share is walked.
            mine = order[own.start : own.stop : own.step].clone() if len(own) else order[:0].clone()
            pieces = (mine[first : first + most].tolist() for first in range(0, len(mine), most))
        del order
        yield from pieces
        if padding is not None:
            yield (padding,)

    def indices(self, order: torch.Tensor | None) -> torch.Tensor:
        """The same as one tensor."""
        parts = [
            torch.as_tensor(part, dtype=torch.int64, device="cpu")
            for part in self.parts(order, most=max(self.length, 1))
        ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")

    def _own_positions(self) -> range:
        stop = self.length
        if self.tail == "drop":
            stop = self.start + (self.length - self.start) // self.world_size * self.world_size
        return range(self.start + self.rank, stop, self.world_size)

    def _padding(self, order: torch.Tensor | None) -> int | None:
        """The one sample that this rank repeats, if any: the order goes on from its beginning, as torch's does."""
        if len(self._own_positions()) == self.count:
            return None
        position = (self.start + self.rank + (self.count - 1) * self.world_size) % self.length
        return position if order is None else int(order[position])
