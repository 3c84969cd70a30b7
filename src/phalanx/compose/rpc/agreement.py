"""Whether all ranks are at the same pass: a few numbers of each rank, added up in places of their own, and read.

Ranks pair their passes in one of two ways. Where a master opens a context and calls the trainers in it, all are in the
same context and its id says so; passes of several such contexts may reach the ranks in any order. Where each trainer
opens a context of its own, ids differ, and it is the order of the passes that pairs them, as with any collective: a rank
is at the oldest of its open passes, or at the one behind it, and so are all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

ROW_LENGTH = 5


class Phase(IntEnum):
    """What a round is for."""

    FORWARD = 1
    """To tell each other which parameters were used."""
    BACKWARD = 2


class Status(IntFlag):
    OK = 0
    OUT = 1
    """It has no input left, and only keeps the others company."""
    RAISED = 2
    """Its backward pass raised."""
    MISSING = 4
    """Some of its parameters got no gradient."""


@dataclass(frozen=True)
class Row:
    """What a rank says of itself."""

    context: int
    is_own: bool
    """Whether the context was opened by this rank."""
    place: int
    """How many open passes of this rank are older."""
    phase: Phase
    status: Status = Status.OK

    def numbers(self) -> list[int]:
        return [self.context, int(self.is_own), self.place, int(self.phase), int(self.status)]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Row:
        context, is_own, place, phase, status = numbers
        return cls(context, bool(is_own), place, Phase(phase), Status(status))


@dataclass(frozen=True)
class Verdict:
    """The same on every rank, since it is made of the same numbers. All fields empty: go on."""

    first: int | None = None
    """Ranks are at different contexts: nothing of this round counts, and the pass of this one comes first."""
    failed: tuple[int, ...] = ()
    problem: str = ""
    is_final: bool = False
    """Ranks were not at the same pass, so nobody can tell what the next one would be paired with."""


def judge(rows: Sequence[Row]) -> Verdict:
    active = {rank: row for rank, row in enumerate(rows) if not row.status & Status.OUT}
    phases = {row.phase for row in active.values()}
    contexts = {row.context for row in active.values()}
    all_own = all(row.is_own for row in active.values())
    together = len(phases) <= 1 and (len(contexts) <= 1 or all_own)
    for status, said in ((Status.RAISED, "raised in its backward pass"), (Status.MISSING, "got not all gradients")):
        failed = tuple(rank for rank, row in active.items() if row.status & status)
        if failed:
            problem = f"rank {failed[0]} {said}; the gradients in this context are dropped"
            return Verdict(failed=failed, problem=problem, is_final=not together)
    if len(contexts) <= 1 and len(phases) <= 1:
        return Verdict()
    if len(contexts) > 1 and not all_own:
        return Verdict(first=min(contexts))
    if len(phases) > 1:
        problem = f"{_listed(active, phase=True)}: run as many forward as backward passes, on all ranks"
        return Verdict(problem=problem, is_final=True)
    if len({row.place for row in active.values()}) > 1:
        return Verdict(
            problem=f"ranks are at the backward passes of different contexts ({_listed(active)}). Run the backward "
            "passes of several open contexts in the same order on all ranks",
            is_final=True,
        )
    return Verdict()


def _listed(rows: dict[int, Row], *, phase: bool = False) -> str:
    if phase:
        return ", ".join(f"rank {rank} is at a {row.phase.name.lower()} pass" for rank, row in rows.items())
    return ", ".join(f"rank {rank} at number {row.place + 1} of its open ones" for rank, row in rows.items())
