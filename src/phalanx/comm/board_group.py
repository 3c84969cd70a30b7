"""What the ranks of a group tell each other beside its collectives: rare agreements, and why one of them fails.

They do so over a board, which needs no tensor and no order: a rank that waits in a collective reads who will not come.
"""

from __future__ import annotations

import base64
import copy
import itertools
import json
import logging
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from phalanx.comm.board import Board, Poll
from phalanx.comm.group import Group, Passes, Undertaking
from phalanx.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    PhalanxError,
    ranks_behind,
)

logger = logging.getLogger(__name__)
_GIVEN_UP = (
    "This was found while the device waited for that rank, and the group's communicator was aborted so that it goes on: "
    "gradients of that step are no averages here, and an optimizer may have used them. Go back to a checkpoint, or stop"
)
_GUESSES = "killed, out of memory, or at its end after fewer steps?"
# A rank that dies takes its connections with it before its farewell can be read: how long survivors look for the cause.
CAUSE_WITHIN_S = 0.6
# A peer that died may have done its part before: what it sent is still on its way. After this time it is missed.
MISSED_AFTER_S = 1.0


@dataclass
class Ledger:
    """What the ranks of a process group have said to each other so far. It lives as long as the process group: an
    adapter that is made anew must not take up an old exchange, on one rank and not on another."""

    board: Board | None
    """None where a rank is alone."""
    turns: dict[str, int] = field(default_factory=dict)
    serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))


class BoardGroup(Group):
    """The part of a group that does not depend on how its tensors travel."""

    def __init__(self, ledger: Ledger, *, rank: int, size: int, name: str) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.topics: set[str] = set()
        self.undertakings: list[Undertaking] = []
        self.passes: weakref.WeakSet[Passes] = weakref.WeakSet()
        self.board = ledger.board
        self._exchanges = ledger.turns
        self._serials = ledger.serials
        self._aborted: str | None = None
        self._given_up_for: PhalanxError | None = None
        self._dead_since: dict[int, float] = {}

    def next_serial(self) -> int:
        return next(self._serials)

    def exchange(self, label: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        if self.board is None:
            return [payload]
        self.await_broken_passes()
        turn = self._exchanges.get(label, 0)
        self._exchanges[label] = turn + 1
        key = f"exchange/{label}/{turn}"
        if self.rank != 0:
            self.board.try_put(f"{key}/{self.rank}", payload)
        poll = Poll(timeout_s)
        if self.rank == 0:
            parts: dict[int, bytes] = {0: payload}
            while len(parts) < self.size:
                for rank in range(1, self.size):
                    if rank not in parts and (part := self.board.try_get(f"{key}/{rank}")) is not None:
                        parts[rank] = part
                        self.board.remove(f"{key}/{rank}")
                self._wait_for(poll, label, [r for r in range(self.size) if r not in parts])
            everyone = [parts[rank] for rank in range(self.size)]
            self.board.try_put(key, json.dumps([base64.b64encode(part).decode() for part in everyone]).encode())
            return everyone
        while (published := self.board.try_get(key)) is None:
            try:
                self._wait_for(poll, label, [0])
            except PhalanxError:
                # A rank that was quicker may have failed over what was published, as this one will by itself.
                if (published := self.board.try_get(key)) is None:
                    raise
                break
        return [base64.b64decode(part) for part in json.loads(published)]

    def await_broken_passes(self) -> None:
        """Before anything else is sent: let a pass that broke off tell the others, so that all send in the same order."""
        for passes in list(self.passes):
            passes.await_broken()

    def _wait_for(self, poll: Poll, label: str, missing: list[int]) -> None:
        if not missing:
            return
        if poll.expired():
            late = [r for r in range(self.size) if r != self.rank and self._absent(label, r)] or missing
            reason = (
                f"{_ranks(late)} did not come within {poll.timeout_s:g} s to where all ranks tell each other: {label}"
            )
            self.post_failure("", reason)
            raise MismatchError(
                f"{reason}; every rank must get here, in the same order", rank=self.rank, group=self.name
            )
        self.check_notices()
        poll.pause()

    def _absent(self, label: str, rank: int) -> bool:
        turn = self._exchanges[label] - 1
        return self.board is not None and rank != 0 and self.board.try_get(f"exchange/{label}/{turn}/{rank}") is None

    def post_failure(self, topic: str, reason: str) -> None:
        if self.board is not None:
            try:
                self.board.post("failed", topic, reason)
            except RuntimeError as error:  # the store is gone, and who could read it is told so by its own waits
                logger.debug("rank %d could not post its failure: %s", self.rank, error)

    def failure_of(self, rank: int, topic: str) -> str | None:
        if self.board is None:
            return None
        poll = Poll(CAUSE_WITHIN_S)
        while not poll.expired():
            for notice in self.board.notices():
                if notice.rank == rank and (notice.kind == "left" or notice.topic == topic):
                    return notice.reason
            poll.pause()
        return None

    def check_notices(self, also: Collection[str] = ()) -> None:
        if self._given_up_for is None:  # the board is of use where the communicator is not
            self.check_alive()
        if self.board is None:
            return
        try:
            notices = self.board.notices()
            dead = self.board.dead_ranks()
        except RuntimeError as error:  # the store's host is gone, and with it the store
            raise PeerLostError(
                "the rank that hosts the rendezvous store (rank 0 of the job) is gone",
                lost_ranks=(0,),
                rank=self.rank,
                group=self.name,
            ) from error
        # What concerns this undertaking first: what others have since said of the whole group is a consequence of it.
        for notice in sorted(notices, key=lambda notice: not notice.topic):
            if notice.rank == self.rank and notice.kind != "aborted":
                continue
            if notice.kind == "aborted":
                self._aborted = notice.reason
                self.check_alive()
            elif notice.kind == "left":
                raise PeerLostError(
                    f"rank {notice.rank} left: {notice.reason}",
                    lost_ranks=(notice.rank,),
                    rank=self.rank,
                    group=self.name,
                )
            elif not notice.topic or notice.topic in also or self.is_at(notice.topic):
                raise PeerFailedError(
                    f"rank {notice.rank} failed: {notice.reason}",
                    failed_ranks=(notice.rank,),
                    rank=self.rank,
                    group=self.name,
                )
        self._check_peers_live(dead)

    def _check_peers_live(self, dead: list[int]) -> None:
        """Raise for a rank of this host that is gone: not every survivor has a connection that breaks with it."""
        now = time.monotonic()
        self._dead_since = {rank: self._dead_since.get(rank, now) for rank in dead}
        missed = [rank for rank, since in self._dead_since.items() if now - since > MISSED_AFTER_S]
        if missed:
            raise PeerLostError(
                f"{_ranks(missed)} died without a word ({_GUESSES})",
                lost_ranks=missed,
                rank=self.rank,
                group=self.name,
            )

    def explain(self, error: BaseException, what: str) -> PhalanxError:
        """The cause behind a collective's own exception, as far as the board and this host's processes tell."""
        if isinstance(error, PhalanxError):
            return error
        text = str(error)
        if "timed out" in text.lower() and "connection" not in text.lower():
            return CollectiveTimeoutError(f"{what} timed out: {text}", rank=self.rank, group=self.name)
        poll = Poll(CAUSE_WITHIN_S)
        dead: list[int] = []
        while self.board is not None and not poll.expired():
            try:
                self.check_notices()
                dead = self.board.dead_ranks()
            except PhalanxError as cause:
                return cause
            except RuntimeError:
                break
            if dead:
                break
            poll.pause()
        if dead:
            message = f"{_ranks(dead)} died during {what} without a word ({_GUESSES}): {text}"
        elif self.size == 2:
            dead = [1 - self.rank]
            message = f"lost the connection to rank {1 - self.rank} during {what}: {text}"
        else:
            message = f"{what} failed: {text}"
        return PeerLostError(message, lost_ranks=dead, rank=self.rank, group=self.name)

    def is_beyond_doubt(self, error: PhalanxError) -> bool:
        """Whether nothing can come any more from the ranks that are the cause: processes of this host that are gone."""
        if isinstance(error, GroupAbortedError):
            return True
        ranks = ranks_behind(error)
        try:
            return bool(ranks) and self.board is not None and set(ranks) <= set(self.board.dead_ranks())
        except RuntimeError:  # the store is gone
            return False

    def check_alive(self) -> None:
        if self._given_up_for is not None:
            error = copy.copy(self._given_up_for)
            error.add_note(_GIVEN_UP)
            raise error
        if self._aborted is not None:
            raise GroupAbortedError(f"the group was aborted: {self._aborted}", rank=self.rank, group=self.name)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(str(rank) for rank in ranks)
