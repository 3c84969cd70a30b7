"""This rank's weight in a step's average: how many samples (or tokens) its gradients stand for.

Gradients of several passes may be added up before they are reduced, each the mean over another number of samples. They
are kept in the unit of the last pass: where the next has another size, what is kept is multiplied by the ratio, and all
of it by the last size when it is sent. Passes of equal size cost nothing.
"""

from __future__ import annotations

from typing import Literal

from phalanx.reducer.unused import Flag, Report

Reduction = Literal["mean", "sum"]


class StepWeight:
    """What was said of the step under way, pass by pass."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._last: float | None = None
        self._total = 0.0
        self._passes = 0
        self._reduction: Reduction = "mean"

    @property
    def given(self) -> bool:
        return self._last is not None

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


def total_weight(report: Report) -> float:
    """Of those that count: who is out of a weighted step does not."""
    weighted, out = report.ranks_with(Flag.WEIGHTED), report.ranks_with(Flag.OUT)
    return sum(weight for rank, weight in enumerate(report.weights) if rank not in out or not weighted)


def wrong_weights(report: Report) -> str:
    """What is wrong with the weights that the ranks gave; nothing in most steps."""
    weighted, out = report.ranks_with(Flag.WEIGHTED), report.ranks_with(Flag.OUT)
    missing = [rank for rank in range(len(report.flags)) if weighted and rank not in weighted and rank not in out]
    if missing:
        return f"ranks {weighted} gave a weight for this step, ranks {missing} did not: give one on all, or on none"
    total = total_weight(report)
    if weighted and total <= 0:
        return f"the weights of all ranks add up to {total:g}: at least one must be positive"
    return ""
