"""What the ranks tell each other at the end of a step, at no extra collective: the numbers in the last bucket's tail.

Which parameters were used is knowledge of all ranks, every step: a parameter that no rank used must keep
``grad is None`` (optimizers then leave it alone), and one that some rank used must get the average everywhere. Every
rank writes a one per parameter that it used; after the sum each rank reads how many did. The same tail carries, per
bucket, whether a gradient came after the bucket had left, and per rank a weight and a few flags, in a place of that
rank's own so that the sum is the list of all.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property, reduce

import torch


class Flag(IntFlag):
    """What a rank may have to say of its step."""

    WEIGHTED = 1
    """It gave a weight for this step."""
    FAILED = 2
    """Its backward pass raised: what it sent is not to be used."""
    CHANGED = 4
    """Its parameters are no longer those that were agreed on."""
    TRAINING = 8
    """Its module is in training mode: its buffers may have changed."""
    LAST = 16
    """It has no batch after the one of this step."""
    OUT = 32
    """It has no batch in this step: it takes part with nothing, to keep the others company."""


@dataclass(frozen=True)
class Report:
    """The sum over all ranks, read."""

    used: list[int] | None
    """By parameter, how many ranks used it; None where every rank used every parameter."""
    late: list[int]
    """Buckets for which some rank holds a late gradient."""
    weights: list[float]
    flags: list[Flag]

    @cached_property
    def _any(self) -> int:
        return reduce(operator.or_, map(int, self.flags), 0)

    def ranks_with(self, flag: Flag) -> list[int]:
        if not flag.value & self._any:  # an IntFlag's own operations are slow, and this is asked several times a step
            return []
        return [rank for rank, flags in enumerate(self.flags) if flag & flags]


class ControlBlock:
    """The layout of the tail, and its writing and reading."""

    def __init__(self, *, num_parameters: int, num_buckets: int, rank: int, size: int) -> None:
        self._num_parameters = num_parameters
        self._late_at = num_parameters
        self._weights_at = num_parameters + num_buckets
        self._flags_at = self._weights_at + size
        self._rank = rank
        self._size = size
        self.length = self._flags_at + size
        self._quiet: dict[Flag, torch.Tensor] = {}
        self._usual: dict[tuple[Flag, bool, torch.dtype], torch.Tensor] = {}
        self._expected: dict[Flag, Report] = {}

    def write(
        self, tail: torch.Tensor, *, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: Flag
    ) -> None:
        """Write this rank's part; `used` is None where it used every parameter, which is the cheap and common case."""
        if used is None and not late and weight == 1.0:
            known = self._quiet.get(flags)
            if known is None:
                known = torch.tensor(self._compose(None, (), 1.0, flags), dtype=tail.dtype, device=tail.device)
                self._quiet[flags] = known
            tail.copy_(known)
            return
        tail.copy_(torch.tensor(self._compose(used, late, weight, flags), dtype=tail.dtype))

    def _compose(self, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: Flag) -> list[float]:
        numbers = [0.0] * self.length
        for index in range(self._num_parameters):
            numbers[index] = 1.0 if used is None or used[index] else 0.0
        for bucket in late:
            numbers[self._late_at + bucket] = 1.0
        numbers[self._weights_at + self._rank] = weight
        numbers[self._flags_at + self._rank] = float(flags)
        return numbers

    def alone(self, *, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: Flag) -> Report:
        """What a rank that has no others would read."""
        return Report(None if used is None else [int(one) for one in used], list(late), [weight], [flags])

    def expected(self, flags: Flag) -> Report:
        """What is read when all is well: every rank used everything, and says what this one says."""
        report = self._expected.get(flags)
        if report is None:
            report = self._expected[flags] = Report(None, [], [1.0] * self._size, [flags] * self._size)
        return report

    def numbers_expected(self, flags: Flag, *, averaged: bool) -> torch.Tensor:
        """The reduced tail in that case."""
        numbers = torch.zeros(self.length, dtype=torch.float64)
        numbers[: self._late_at] = self._size
        numbers[self._weights_at : self._flags_at] = 1.0
        numbers[self._flags_at :] = float(flags)
        return numbers / self._size if averaged else numbers

    def says_all_is_well(self, numbers: torch.Tensor, flags: Flag, *, averaged: bool) -> bool:
        """Whether the reduced tail, on the host, says what is expected of ranks that all say `flags`. One comparison."""
        key = (flags, averaged, numbers.dtype)
        usual = self._usual.get(key)
        if usual is None:
            usual = self._usual[key] = self.numbers_expected(flags, averaged=averaged).to(numbers.dtype)
        return torch.equal(numbers, usual)

    def read(self, tail: torch.Tensor, *, averaged: bool) -> Report:
        """Read the reduced tail. A backend that averages divided it by the number of ranks: that is undone here."""
        factor = self._size if averaged else 1
        rest = [number * factor for number in tail[self._late_at :].tolist()]
        late = [bucket for bucket in range(self._weights_at - self._late_at) if rest[bucket] > 0.5]
        weights = rest[self._weights_at - self._late_at : self._flags_at - self._late_at]
        flags = [Flag(round(number)) for number in rest[self._flags_at - self._late_at :]]
        used = None
        if self._num_parameters:
            counts = tail[: self._num_parameters]
            if round(float(counts.min()) * factor) != self._size:
                used = [round(number * factor) for number in counts.tolist()]
        return Report(used, late, weights, flags)
