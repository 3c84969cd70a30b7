"""A reducer in a world of one that calls its collectives all the same: what it costs apart from the others."""

from __future__ import annotations

from dataclasses import replace

from phalanx.reducer.reducer import Reducer


def communicate_alone(reducer: Reducer) -> None:
    """Call the collectives although there is nobody else."""
    reducer._carrier._reduces_alone = True
    reducer.options = replace(reducer.options, reduce_alone=True)
