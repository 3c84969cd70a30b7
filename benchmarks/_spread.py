"""Ratios of interleaved measurements, with their spread: an absolute time on a shared machine means nothing."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """A median and its 95 % interval, by resampling what was measured."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    return spread_by_place([values])


def spread_by_place(values: Sequence[Sequence[float]]) -> Spread:
    """Of measurements in several places, each of which has something of its own: places are resampled, too."""
    return _resampled(values, statistics.median)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of measurements taken side by side, round by round."""
    return spread([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of small differences, whose ratio within a round means nothing; the rounds are resampled together."""
    return ratio_by_place([numerators], [denominators])


def ratio_by_place(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> Spread:
    """Likewise, in several places."""

    def ratio(drawn: Sequence[tuple[float, float]]) -> float:
        bottom = statistics.median(bottom for _, bottom in drawn)
        return statistics.median(top for top, _ in drawn) / bottom if bottom else math.nan

    places = [list(zip(tops, bottoms, strict=True)) for tops, bottoms in zip(numerators, denominators, strict=True)]
    return _resampled(places, ratio)


def _resampled(places: Sequence[Sequence[Any]], figure: Callable[[Sequence[Any]], float]) -> Spread:
    """A figure of all that was measured, and its 95 % interval: places are drawn and, within each, as many rounds again."""
    source = random.Random(0)

    def drawn() -> list[Any]:
        chosen = source.choices(places, k=len(places))
        return [one for place in chosen for one in source.choices(place, k=len(place))]

    figures = sorted(figure(drawn()) for _ in range(NUM_RESAMPLES))
    every = figure([one for place in places for one in place])
    return Spread(every, figures[int(0.025 * NUM_RESAMPLES)], figures[int(0.975 * NUM_RESAMPLES) - 1])
