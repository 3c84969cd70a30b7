"""Whether this rank can go on with the others after something broke off, and what must happen before it does."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from phalanx.comm.group import Group, Work
from phalanx.errors import PeerFailedError, PhalanxError

AGREE_WITHIN_S = 1800.0  # a rank may be long in coming, as to any collective


class Standing:
    """Three degrees of trouble: works still under way, a step that may not have ended alike, a group that is lost."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.is_clear = True
        """Whether there is no trouble of any degree: nothing to `check` or to `settle`."""
        self._draining: list[Work] = []
        self._parted: str | None = None
        self._broken: PhalanxError | None = None

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def check(self) -> None:
        """Raise what made the group of no use, if anything did."""
        if self._broken is not None:
            error = copy.copy(self._broken)
            error.add_note(
                "This was found in an earlier step, and the ranks have not been in step since: what was put right then was "
                "not looked at. phalanx.replicate(phalanx.unreplicate(module)) on every rank begins anew"
            )
            raise error

    def break_off(self, error: PhalanxError) -> None:
        """This rank did not come to the end of what all ranks share, and no longer knows where the others are."""
        self.is_clear = False
        self._broken = copy.copy(error)  # without its traceback, which leads to the model: a circle through its hooks

    def drain_later(self, works: Iterable[Work]) -> None:
        """These were launched by a step that was given up."""
        self._draining += works
        self.is_clear = self.is_clear and not self._draining

    def settle(self, step: int) -> None:
        """Before anything is sent: see to what earlier steps have left."""
        self._rejoin(step)
        self.drain()
        self.is_clear = self._broken is None

    def drain(self) -> None:
        """What an abandoned step has launched must be over before its buffers are used again."""
        works, self._draining = self._draining, []
        for work in works:
            work.wait()

    def part(self, how: str) -> None:
        """A step under a hook broke off, this way. It may have left collectives open, on some ranks and not on others."""
        self.is_clear = False
        self._parted = how

    def _rejoin(self, step: int) -> None:
        """Before anything is sent again: go on if the step broke off alike on all ranks, and on none if not.

        Otherwise a collective that one rank left open would be taken for another's, with no error or with an abort.
        """
        if self._parted is None:
            return
        how, self._parted = self._parted, None
        said = [
            part.decode() for part in self.group.exchange("step broken off", how.encode(), timeout_s=AGREE_WITHIN_S)
        ]
        if len(set(said)) > 1:
            raise PeerFailedError(
                "an earlier step did not end alike on all ranks, and what its communication hook has left open is not "
                f"known ({'; '.join(f'rank {rank} {end}' for rank, end in enumerate(said))}). Give the module another "
                "process group, or build it anew",
                failed_ranks=[rank for rank, end in enumerate(said) if end != "waited"],
                rank=self.group.rank,
                step=step,
            )

    def drain_if_sound(self) -> None:
        """Likewise, before a group is given up; not where some of it may never end."""
        if self._broken is None and self._parted is None:
            self.drain()

    def begin_anew(self, group: Group) -> None:
        """Another group: what is still open on the old one may never end, and concerns nobody."""
        self._draining.clear()
        self._parted = self._broken = None
        self.is_clear = True
        self.group = group
