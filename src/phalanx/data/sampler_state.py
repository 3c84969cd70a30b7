"""Where a sampler stands, as numbers that a checkpoint holds, and the check that they fit the sampler that gets them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

_MUST_AGREE = {
    "length": "dataset length",
    "seed": "seed",
    "shuffle": "shuffle",
    "drop_last": "drop_last",
    "pad": "pad",
}


@dataclass(frozen=True)
class Place:
    """A point in a sampler's life: so many samples of this epoch's order are used, by all ranks together."""

    epoch: int
    position: int
    ended: bool = False
    """The iteration is over, not only its last sample drawn: who goes on from here is in the next epoch."""


@dataclass(frozen=True)
class OrderOptions:
    """What makes the order of an epoch; a place means something only together with these."""

    length: int
    seed: int
    shuffle: bool
    drop_last: bool
    pad: bool


def to_state(options: OrderOptions, place: Place) -> dict[str, Any]:
    return {**asdict(options), **asdict(place)}


def from_state(options: OrderOptions, state: Mapping[str, Any]) -> Place:
    """The place that a state holds; ValueError with both sides where it is of another order."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a sampler's state is the dict that its state_dict() gave, got {type(state).__name__}")
    expected = [field.name for cls in (OrderOptions, Place) for field in fields(cls)]
    missing = [name for name in expected if name not in state]
    if missing:
        raise ValueError(
            f"this is no state of a phalanx.DistributedSampler: it lacks {', '.join(missing)}; it has "
            f"{', '.join(map(str, state)) or 'nothing'}"
        )
    wrong = [
        f"{label}: the sampler has {getattr(options, name)!r}, the state {state[name]!r}"
        for name, label in _MUST_AGREE.items()
        if state[name] != getattr(options, name)
    ]
    if wrong:
        raise ValueError(
            "the state was saved by a sampler of another order, so its position means nothing here ("
            + "; ".join(wrong)
            + "). Make the sampler as it was made when the state was saved; only rank and num_replicas may differ"
        )
    epoch, position = _integer(state, "epoch"), _integer(state, "position")
    if not 0 <= position <= options.length:
        raise ValueError(
            f"position must lie between 0 and the dataset length {options.length}, the state has {position}"
        )
    return Place(epoch, position, bool(state["ended"]))


def _integer(state: Mapping[str, Any], name: str) -> int:
    try:
        return operator.index(state[name])
    except TypeError:
        raise ValueError(f"{name} must be an integer, the state has {state[name]!r}") from None
