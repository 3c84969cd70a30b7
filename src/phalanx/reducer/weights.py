"""This rank's weight in a step's average: how many samples (or tokens) its gradients stand for.

Gradients of several passes may be added up before they are reduced, each the mean over another number of samples. They
are kept in the unit of the last pass: where the next has another size, what is kept is multiplied by the ratio, and all
of it by the last size when it is sent. Passes of equal size cost nothing.
"""

from __future__ import annotations

import math
from typing import Literal

from phalanx.reducer.unused import Flag, Report

Reduction = Literal["mean", "sum"]


class StepWeight:
    """What was said of the step under way, pass by pass."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.given = False
        """Whether anything was said."""
        self._last: float | None = None
        self._total = 0.0
        self._passes = 0
        self._reduction: Reduction = "mean"

    @property
    def total(self) -> float:
        """This rank's weight; one where none was given."""
        return 1.0 if self._last is None else self._total

    @property
    def scale(self) -> float:
        """What the gradient at hand is multiplied with, so that all ranks' sum is the sum over all samples."""
        return 1.0 if self._last is None or self._reduction == "sum" else self._last

    def add(self, weight: float, reduction: Reduction, *, num_passes: int) -> float:
        """`weight` more, for the pass after `num_passes`; returns what gradients that were kept must be multiplied with."""
        last, first = self._last, self._last is None
        if not first and reduction != self._reduction:
            raise ValueError(
                f"this step's weights were given for gradients of a {self._reduction}, and now of a {reduction}: "
                "use one in all passes of a step"
            )
        self.given = True
        self._reduction = reduction
        self._total += weight
        same_pass = num_passes == self._passes
        self._passes = num_passes
        if last is None or same_pass:  # said before the first, or twice of the same pass
            self._last = weight + (last or 0.0)
            return 1.0
        if weight == 0:  # of an empty batch: it adds nothing, and the unit stays
            return 1.0
        self._last = weight
        return 1.0 if reduction == "sum" else last / weight


class Weighting:
    """This rank's weight in the step under way, and what averages are multiplied with for all ranks' weights."""

    def __init__(self, size: int) -> None:
        self.mine = StepWeight()
        self.shadows: float | None = None
        """While this rank shadows a step: what it weighs there."""
        self.begin_anew(size)

    def begin_anew(self, size: int) -> None:
        """Another group: nothing is known of its ranks' weights."""
        self._size = size
        self._unit = 1.0  # about the mean weight in the last weighted step: large ones overflow half precision
        self.share = 1 / size
        """What this rank's gradients were multiplied with in the last step."""

    @property
    def is_plain(self) -> bool:
        """Whether this rank takes part as if nobody gave weights."""
        return not self.mine.given and self.shadows is None

    @property
    def factor(self) -> float:
        """What gradients are multiplied with on their way into a bucket."""
        return self.mine.scale / self._unit if self.mine.given else 1.0

    @property
    def told(self) -> float:
        """What this rank says that it weighs."""
        return self.mine.total if self.shadows is None else self.shadows

    @property
    def flags(self) -> int:
        flags = Flag.WEIGHTED if self.mine.given else Flag.NONE
        return flags if self.shadows is None else flags | Flag.OUT

    def settle(self, report: Report, *, divisor: int | None, averages_over_all: bool) -> float:
        """What a step's averages must still be multiplied with. `divisor` is what sums were divided by, if not by all.

        With `averages_over_all` that was left to a hook, which knows of no rank that is out.
        """
        self.share = 1 / (divisor or self._size)
        if not report.has(Flag.WEIGHTED | Flag.OUT):
            return 1.0
        weighted, out = report.ranks_with(Flag.WEIGHTED), report.ranks_with(Flag.OUT)
        total = total_weight(report)
        if total == 0:
            return 1.0  # all ranks are out
        by_size = divisor is None or averages_over_all
        factor = (self._size if by_size else self._size - len(out)) * (self._unit if weighted else 1.0) / total
        self.share = self.mine.scale / total
        if weighted:
            self._unit = 2.0 ** round(math.log2(total / self._size))  # a power of two rounds nothing
        return factor


def total_weight(report: Report) -> float:
    """Of those that count: who is out of a weighted step does not."""
    weighted, out = report.ranks_with(Flag.WEIGHTED), report.ranks_with(Flag.OUT)
    return sum(weight for rank, weight in enumerate(report.weights) if rank not in out or not weighted)


def wrong_weights(report: Report) -> str:
    """What is wrong with the weights that the ranks gave; nothing in most steps."""
    weighted, out = report.ranks_with(Flag.WEIGHTED), report.ranks_with(Flag.OUT)
    if not weighted:
        return ""
    missing = [rank for rank in range(len(report.flags)) if rank not in weighted and rank not in out]
    if missing:
        return f"ranks {weighted} gave a weight for this step, ranks {missing} did not: give one on all, or on none"
    total = total_weight(report)
    if total <= 0:
        return f"the weights of all ranks add up to {total:g}: at least one must be positive"
    return ""
