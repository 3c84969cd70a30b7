"""Who is to blame when a call times out: found by asking every peer what it is doing.

A rank that waits may wait for one that waits itself. Healthy processes answer on their watching thread, whatever their
other threads do; a stopped one does not answer at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Whereabouts:
    """What a rank says of itself: its last call, whether it is still in it, and for whom it waits (-1: nobody)."""

    seq: int
    call: str
    inside: bool
    waits_for: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Whereabouts:
        return cls(**json.loads(raw))


def blame(first: int, seq: int, own: int, answers: Mapping[int, Whereabouts]) -> tuple[int, str]:
    """(rank, what it does). `own` is the rank that asks; it has waited in vain for `first` in its call number `seq`."""
    rank, seen = first, {own}
    while True:
        said = answers.get(rank)
        if said is None:
            return rank, f"rank {rank} does not answer: it is stopped, or too busy to run any of its threads"
        if said.seq < seq:
            if said.inside and said.waits_for >= 0 and said.waits_for not in seen:
                # It has not come because it waits itself, in a call before: whoever keeps it there keeps us all.
                seen.add(rank)
                rank, seq = said.waits_for, said.seq
                continue
            doing = f"is still in {said.call}" if said.inside else f"has made no call since {said.call or 'it began'}"
            return rank, f"rank {rank} has not entered it: it {doing}"
        seen.add(rank)
        if not said.inside or said.waits_for < 0 or said.waits_for in seen:
            where = "works on it" if said.inside else "has left it"
            return rank, f"rank {rank} {where}, but was too slow"
        rank = said.waits_for
