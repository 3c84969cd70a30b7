"""How a step breaks off: what this rank forgets, what it tells the others, and what it can still do with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import torch

from phalanx.comm.group import Group, Work
from phalanx.errors import GroupAbortedError, PeerFailedError, PeerLostError, PhalanxError
from phalanx.reducer.arrivals import Arrivals, Mode
from phalanx.reducer.bucket import Bucket, ParameterSlot
from phalanx.reducer.carrier import Carrier
from phalanx.reducer.grad_hooks import BackwardPasses, current_pass
from phalanx.reducer.options import ReducerOptions, ReducerStats
from phalanx.reducer.planner import Planner
from phalanx.reducer.standing import Standing
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.weights import Weighting

logger = logging.getLogger(__name__)


class BreakingOff:
    """The part of a reducer that is called when a step cannot go on."""

    group: Group
    options: ReducerOptions
    stats: ReducerStats
    label: str
    mode: Mode | None
    slots: list[ParameterSlot]
    buckets: list[Bucket]
    arrivals: Arrivals
    planner: Planner
    weighting: Weighting
    _carrier: Carrier
    _passes: BackwardPasses
    _standing: Standing
    behind_step: Callable[[Report], None]
    _launch_rest: Callable[[int], list[Work]]

    @property
    def may_be_read_late(self) -> bool:
        raise NotImplementedError

    # -- the step, as ranks name it to each other ---------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step under way or about to begin, from 1."""
        return self.stats.steps + 1

    @property
    def topic(self) -> str:
        """The step under way, as ranks name it to each other."""
        return self.topic_of(self.step)

    def topic_of(self, step: int) -> str:
        return f"step {step} of {self.label}"

    @property
    def topics(self) -> tuple[str, str]:
        return self.topic, self._plan_topic

    @property
    def _plan_topic(self) -> str:
        """The step under way with the buckets as they are, for a rank whose parameters no longer fit them."""
        return self._plan_topic_of(self.step)

    def _plan_topic_of(self, step: int) -> str:
        return f"{self.topic_of(step)}, laid out by plan {self.stats.num_plans}"

    @property
    def last_topics(self) -> tuple[str, str]:
        """The step before, which the device may still be in."""
        return self.topic_of(self.step - 1), self._plan_topic_of(self.step - 1)

    # -- breaking off ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget the step under way, on this rank alone: what was launched is waited for before the next begins."""
        self._standing.drain_later(bucket.work for bucket in self.buckets if bucket.work is not None)
        for bucket in self.buckets:
            bucket.work = None
            bucket.streams.forget()
        for slot in self.slots:  # what it had set aside is of that step alone
            slot.late = slot.stale = None
        self.mode = None
        self.arrivals.forget()
        self.weighting.mine.clear()
        if self.planner.arrivals:
            self.planner.arrivals = []
        self._passes.forget()

    def abandon(self) -> None:
        """The backward pass raised. The other ranks wait for this step: give it to them, marked as failed.

        They raise an error that names this rank, and all ranks stay in step, so training may go on.
        """
        if self.mode is not Mode.SYNC or self._standing.is_broken:
            self.reset()
            return
        try:
            if self._carrier.hook is not None:  # what collectives a hook would run, nobody knows: tell them by notice
                self.group.post_failure(self.topic, "its backward pass raised")
                self._part(f"broke off with {self.stats.buckets_launched} buckets sent")
                return
            with torch.no_grad():
                self._standing.drain_later(self._launch_rest(Flag.FAILED))
                if self.may_be_read_late:
                    self.behind_step(self.planner.layout.control.nothing)
        except Exception as error:  # called while another exception is on its way to the user: that one counts
            logger.warning("rank %d could not tell its peers that its backward failed: %s", self.group.rank, error)
        self.reset()
        self.stats.steps += 1

    def abandon_stale(self) -> None:
        """Give up a pass that was broken off unnoticed; called where no pass can be under way in this thread."""
        if self.mode is not None:
            self._passes.await_broken()
        if self.mode is not None and self.options.settle_unused and current_pass() == -1:
            self.abandon()

    def _fail_in_bucket_hook(self, error: Exception) -> None:
        """A bucket hook raised. Which collectives it has left undone nobody knows: ranks that wait are told to give up."""
        if self.mode is Mode.SYNC:
            where = " ".join(getattr(error, "__notes__", ()))
            reason = f"its communication hook raised {type(error).__name__}: {error} {where}".rstrip()
            self.group.post_failure(self.topic, reason)
            self._part(f"broke off with {self.stats.buckets_launched} buckets sent {where}".rstrip())

    def _part(self, how: str) -> None:
        """A step under a hook broke off. It may have left collectives open, on some ranks and not on others."""
        self._standing.part(how)
        self.reset()
        self.stats.steps += 1

    def _drop(self, error: PhalanxError) -> NoReturn:
        """All ranks read the same report, so all drop this step alike. They stay together and may train on."""
        self.reset()
        self.stats.steps += 1
        raise error

    def give_up(self, error: PhalanxError) -> None:
        """Something that all ranks do between steps broke off: the group cannot be used on. Each next step raises this."""
        self._break(error)
        self.reset()

    def _break(self, error: PhalanxError, *, tell: bool = True, step: int | None = None) -> None:
        """This rank did not come to the end of what all ranks share, and no longer knows where the others are."""
        self._standing.break_off(error)
        if tell and isinstance(error, PeerFailedError):  # all who wait in this step read it; who failed waits elsewhere
            self.group.post_failure(f"{self._plan_topic_of(step or self.step)}, answered", str(error))
        elif tell and not isinstance(error, PeerLostError | GroupAbortedError):
            self.group.post_failure("", str(error))
