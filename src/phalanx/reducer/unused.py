"""What the ranks tell each other at the end of a step, at no extra collective: the numbers in the last bucket's tail.

Which parameters were used is knowledge of all ranks, every step: a parameter that no rank used must keep
``grad is None`` (optimizers then leave it alone), and one that some rank used must get the average everywhere. Every
rank writes a one per parameter that it did not use; after the sum each rank reads how many did not. These are digits,
several to a number, so that a model of many small parameters does not get a tail as long as itself. The same tail
carries, per bucket, whether a gradient came after the bucket had left, and per rank a weight and a few flags, in a place of
that rank's own so that the sum is the list of all.

What is usual is zero: where no rank has anything to tell, the tail is zeros before the sum, after it, and before the next
one. So in most steps nothing has to be written, which on a GPU would be a copy for the host to start.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch


class Flag:
    """What a rank may have to say of its step. Plain numbers: an IntFlag's own operations take a µs each."""

    NONE = 0
    WEIGHTED = 1
    """It gave a weight for this step."""
    FAILED = 2
    """Its backward pass raised: what it sent is not to be used."""
    CHANGED = 4
    """Its parameters are no longer those that were agreed on."""
    EVALUATING = 8
    """Its module is not in training mode: its buffers are what they were."""
    LAST = 16
    """It has no batch after the one of this step."""
    OUT = 32
    """It has no batch in this step: it takes part with nothing, to keep the others company."""


_WEIGHS = Flag.WEIGHTED | Flag.OUT  # who says neither has a weight of one


@dataclass(frozen=True)
class Report:
    """The sum over all ranks, read."""

    used: list[int] | None
    """By parameter, how many ranks used it; None where every rank used every parameter."""
    late: list[int]
    """Buckets for which some rank holds a late gradient."""
    weights: list[float]
    flags: list[int]

    @cached_property
    def _any(self) -> int:
        return reduce(operator.or_, self.flags, 0)

    def has(self, flags: int) -> bool:
        """Whether any rank says any of these."""
        return bool(flags & self._any)

    def without(self, flag: int) -> Report:
        """The same, as if no rank had said this."""
        return replace(self, flags=[flags & ~flag for flags in self.flags]) if self.has(flag) else self

    def ranks_with(self, flag: int) -> list[int]:
        if not flag & self._any:
            return []
        return [rank for rank, flags in enumerate(self.flags) if flag & flags]


class Digits:
    """Small counts as digits of numbers that are added up: one digit for each, which never reaches `base`, so none carries.

    A backend that averages may divide each number before it adds them up: each of as many additions as there are ranks then
    rounds. Numbers stay small enough that the average, multiplied again, is nearest to what the sum would have been.
    """

    def __init__(self, *, base: int, dtype: torch.dtype) -> None:
        self._base = base
        largest = int(0.5 / (torch.finfo(dtype).eps * base))
        self._per_number = 1
        while base ** (self._per_number + 1) <= largest:
            self._per_number += 1

    def num_numbers(self, num_counts: int) -> int:
        return -(-num_counts // self._per_number)

    def add_one(self, numbers: list[float], index: int) -> None:
        place, digit = divmod(index, self._per_number)
        numbers[place] += float(self._base**digit)

    def read(self, numbers: Sequence[float]) -> dict[int, int]:
        """The counts that are not zero, by index."""
        found = {}
        for place, number in enumerate(numbers):
            index, left = place * self._per_number, round(number)
            while left > 0:
                left, digit = divmod(left, self._base)
                if digit:
                    found[index] = digit
                index += 1
        return found


class ControlBlock:
    """The layout of the tail, and its writing and reading. Kept with one tail, step after step."""

    def __init__(
        self, *, num_parameters: int, num_buckets: int, rank: int, size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        self._num_parameters = num_parameters
        self._digits = Digits(base=size + 1, dtype=dtype)
        self._late_at = self._digits.num_numbers(num_parameters)
        self._weights_at = self._late_at + num_buckets
        self._flags_at = self._weights_at + size
        self._rank = rank
        self._size = size
        self.length = self._flags_at + size
        self.num_written = 0
        """How often this rank has said something, to tell of which time an answer is."""
        self._is_zero = False  # what was said and answered last has left zeros in the tail
        self.is_captured = False
        """Whether a CUDA graph has captured a step: its replays write there at any time, unseen."""
        self._flags_alone: dict[int, torch.Tensor] = {}
        self.nothing = Report(None, [], [1.0] * size, [Flag.NONE] * size)
        """What is read where no rank has anything to tell."""
        self.nothing_alone = Report(None, [], [1.0], [Flag.NONE])
        """Likewise, of this rank alone."""
        self._zeros = bytes(self.length * dtype.itemsize)
        self._looked_at = (0, (ctypes.c_char * 0)())  # an address, and the bytes that are there

    def write_nothing(self, tail: torch.Tensor) -> None:
        """Have zeros in the tail. Mostly they are left of the last time."""
        if not self._is_zero or self.is_captured:
            tail.zero_()
        self._is_zero = False
        self.num_written += 1

    def write(
        self, tail: torch.Tensor, *, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: int
    ) -> None:
        """Write this rank's part; `used` is None where it used every parameter. The weight is one where no flag tells."""
        self._is_zero = False
        self.num_written += 1
        if used is not None or late or flags & _WEIGHS:
            tail.copy_(torch.tensor(self._compose(used, late, weight, flags), dtype=tail.dtype, device="cpu"))
            return
        known = self._flags_alone.get(flags)
        if known is None:
            numbers = self._compose(None, (), weight, flags)
            pinned = tail.device.type == "cuda"
            known = torch.tensor(numbers, dtype=tail.dtype, device="cpu", pin_memory=pinned)
            self._flags_alone[flags] = known
        tail.copy_(known, non_blocking=True)

    def note_capture(self) -> None:
        """A CUDA graph is being captured: its replays write, and leave in the tail what nobody here reads."""
        self.is_captured = True

    def _compose(self, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: int) -> list[float]:
        numbers = [0.0] * self.length
        for index, is_used in enumerate(used or ()):
            if not is_used:
                self._digits.add_one(numbers, index)
        for bucket in late:
            numbers[self._late_at + bucket] = 1.0
        if flags & _WEIGHS:
            numbers[self._weights_at + self._rank] = weight
        numbers[self._flags_at + self._rank] = float(flags)
        return numbers

    def alone(self, *, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: int) -> Report:
        """What a rank that has no others would read."""
        return Report(None if used is None else [int(one) for one in used], list(late), [weight], [flags])

    def expected(self, flags: int) -> Report:
        """What is read when every rank used everything, and says what this one says."""
        return Report(None, [], [1.0] * self._size, [flags] * self._size) if flags else self.nothing

    def is_usual(self, numbers: torch.Tensor, num_written: int) -> bool:
        """Whether the reduced tail, on the host, says that no rank has anything to tell. One comparison.

        It is what the ranks said when this one had written so often.
        """
        address = numbers.data_ptr()
        if address != self._looked_at[0]:
            self._looked_at = (address, (ctypes.c_char * len(self._zeros)).from_address(address))
        usual = self._looked_at[1].raw == self._zeros  # a tenth of the time that torch takes, cold or warm
        if num_written == self.num_written:
            self._is_zero = usual
        return usual

    def read(self, tail: Sequence[float], *, averaged: bool) -> Report:
        """Read the reduced tail. A backend that averages divided it by the number of ranks: that is undone here."""
        factor = self._size if averaged else 1
        numbers = [number * factor for number in tail]
        rest = numbers[self._late_at :]
        late = [bucket for bucket in range(self._weights_at - self._late_at) if rest[bucket] > 0.5]
        said = rest[self._weights_at - self._late_at : self._flags_at - self._late_at]
        flags = [round(number) for number in rest[self._flags_at - self._late_at :]]
        weights = [weight if flag & _WEIGHS else 1.0 for weight, flag in zip(said, flags, strict=True)]
        unused = self._digits.read(numbers[: self._late_at])
        used = [self._size - unused.get(index, 0) for index in range(self._num_parameters)] if unused else None
        return Report(used, late, weights, flags)
