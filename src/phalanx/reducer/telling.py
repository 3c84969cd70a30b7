"""What ranks tell each other of a step, as this one says it and hears it: at once, or of the step before.

What travels is `unused`'s, how it is written and read `reports`'. Here is what follows from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from phalanx.comm.device_wait import is_capturing
from phalanx.errors import PeerFailedError, PhalanxError, ReducerStateError
from phalanx.reducer import refusals
from phalanx.reducer.breaking_off import BreakingOff
from phalanx.reducer.deferred import DeferredReport
from phalanx.reducer.intake import Intake
from phalanx.reducer.layout import Layout
from phalanx.reducer.reports import Reports
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.weights import wrong_weights

logger = logging.getLogger(__name__)


class Telling(BreakingOff):
    """The part of a reducer that speaks with the other ranks' about steps."""

    layout: Layout
    before_step: Callable[[], None] | None
    on_change: Callable[[Report], None]
    _intake: Intake
    _reports: Reports

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def may_be_read_late(self) -> bool:
        """Whether a rank may go on behind this step before it has read what the others say of it; alike on all ranks.

        Not in a loop that needs to know, nor where they agree on an order behind the step: one whose pass failed does not.
        """
        return self.layout.on_streams and self.before_step is None and self.planner.arrivals is None

    # -- this step -------------------------------------------------------------------------------------------------

    def _say(self, flags: int) -> None:
        """Settle what this rank has to tell the others of this step."""
        used, late = None, []
        if self._intake.irregular or flags & Flag.FAILED:
            self.arrivals.show_rolled()
            used = None if all(slot.seen for slot in self.slots) else [slot.seen > 0 for slot in self.slots]
            late = [bucket.index for bucket in self.buckets if any(slot.late is not None for slot in bucket.slots)]
        self._reports.say(self.layout, used=used, late=late, weight=self.weighting.told, flags=flags)
        if late and self.layout.on_streams:
            self._refuse_late(late)

    @property
    def _must_read_now(self) -> bool:
        """Whether this rank has something unusual to tell, or all ranks read at once."""
        return not self._reports.is_usual or not self.may_be_read_late

    def _refuse_capture(self) -> None:
        if is_capturing(self.layout.control_tensor.device):
            self._drop(refusals.cannot_be_captured(rank=self.group.rank, step=self.step))

    def _refuse_late(self, late: list[int]) -> NoReturn:
        names = [slot.name for index in late for slot in self.buckets[index].slots if slot.late is not None]
        error = refusals.too_late(names, rank=self.group.rank, step=self.step)
        for slot in self.slots:
            slot.late = None
            slot.expected = max(slot.expected, slot.seen)
        self.abandon()
        raise error

    def _raise_for(self, report: Report) -> None:
        if not report.has(Flag.FAILED | Flag.WEIGHTED):
            return
        failed, wrong = report.ranks_with(Flag.FAILED), wrong_weights(report)
        if (failed or wrong) and self.may_be_read_late:
            self.behind_step(report)
        if failed:
            cause = self.group.failure_of(failed[0], self.topic)
            self._drop(refusals.peer_failed(failed, cause, rank=self.group.rank, step=self.step))
        if wrong:
            self._drop(ReducerStateError(wrong, rank=self.group.rank, step=self.step))

    # -- the step before -------------------------------------------------------------------------------------------

    def _hear_of_last_step(self) -> None:
        """What the others had to say of it, where this rank has gone on. A change of theirs is followed here."""
        report = None
        try:
            if self._reports.last_was_usual():
                self.group.check_alive()
            else:
                report = self._reports.read_awaited(self.layout, self._await, rank=self.rank, step=self.step)
        except PhalanxError as error:  # it will never be read: a rank is gone, or left that step open
            if self._carrier.hook is not None and isinstance(error, PeerFailedError):
                self._standing.part("waited")
            else:
                self._break(error, step=self.step - 1)
            raise
        if report is None:
            return
        try:
            self.on_change(report)
        except PhalanxError as error:  # as on the rank that said so
            self._break(error, tell=False)
            raise

    def hear_the_last(self) -> None:
        """No step comes after the last: what the others had to say of it is read now, and logged. Not collective."""
        try:
            self._reports.read_awaited(self.layout, self._await, rank=self.rank, step=self.step)
            self._reports.raise_hindsight()
        except PhalanxError as error:
            logger.error("rank %d, after its last step: %s", self.group.rank, error)

    def _await(self, report: DeferredReport) -> None:
        """Return when the last step's report is there, or raise why it never will be."""
        try:
            report.wait(lambda: self.group.check_notices(also=self.last_topics))
        except PhalanxError as error:  # the device still waits, and whoever waits for it next
            self.group.give_up(error)
            raise
        self.group.check_alive()  # if it was given up, that is why the device came to its end

    @property
    def queued_topics(self) -> tuple[str, ...]:
        """The steps that the device may be in, if it has not come to the end of the last one."""
        return *self.topics, *self.last_topics

    @property
    def turn(self) -> int:
        queued = self._reports.queued
        return 0 if queued is None else queued.turn

    def is_over(self) -> bool:
        """Whether the device has come to the end of the last step, as far as it was queued without waiting for it."""
        queued = self._reports.queued
        return queued is None or queued.is_over()
