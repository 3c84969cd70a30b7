"""Ratios of interleaved measurements, with their spread: an absolute time on a shared machine means nothing."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Spread:
    """A median and its 95 % interval, by resampling the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def spread(values: Sequence[float]) -> Spread:
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return Spread(
        statistics.median(values), medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]
    )


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of measurements taken side by side, round by round."""
    return spread([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of small differences, whose ratio within a round means nothing; the rounds are resampled together."""
    source, pairs = random.Random(0), list(zip(numerators, denominators, strict=True))

    def ratio(drawn: Sequence[tuple[float, float]]) -> float:
        return statistics.median(top for top, _ in drawn) / statistics.median(bottom for _, bottom in drawn)

    ratios = sorted(ratio(source.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES))
    return Spread(ratio(pairs), ratios[int(0.025 * NUM_RESAMPLES)], ratios[int(0.975 * NUM_RESAMPLES) - 1])


def ratio_by_place(numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]]) -> Spread:
    """Likewise, of measurements in several places, each of which has something of its own: places are resampled, too."""
    source = random.Random(0)
    places = [list(zip(tops, bottoms, strict=True)) for tops, bottoms in zip(numerators, denominators, strict=True)]

    def ratio(drawn: Sequence[tuple[float, float]]) -> float:
        bottom = statistics.median(bottom for _, bottom in drawn)
        return statistics.median(top for top, _ in drawn) / bottom if bottom else float("nan")

    def resampled() -> list[tuple[float, float]]:
        chosen = source.choices(places, k=len(places))
        return [pair for place in chosen for pair in source.choices(place, k=len(place))]

    ratios = sorted(ratio(resampled()) for _ in range(NUM_RESAMPLES))
    every = ratio([pair for place in places for pair in place])
    return Spread(every, ratios[int(0.025 * NUM_RESAMPLES)], ratios[int(0.975 * NUM_RESAMPLES) - 1])
