"""What has become of a group: alive, or failed once and for all, and which ranks have said goodbye.

A failure names the rank at fault, not the rank that noticed, so that it can be passed on: whoever notices first tells
all others, and every survivor raises an error that names the same rank.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from phalanx.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    PhalanxError,
)

log = logging.getLogger("phalanx.comm.shm")

_SETTLE_S = 10.0
KINDS = ("lost", "failed", "aborted", "timeout", "mismatch")


@dataclass(frozen=True)
class Failure:
    """Why a group can no longer be used. `rank` is the rank at fault, -1 where nobody is."""

    kind: str
    rank: int
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a failure is one of {', '.join(KINDS)}, not {self.kind!r}")

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()[:32768]

    @classmethod
    def decode(cls, raw: bytes) -> Failure:
        fields = json.loads(raw)
        return cls(str(fields["kind"]), int(fields["rank"]), str(fields["text"]))

    def error(self, *, rank: int, group: str) -> PhalanxError:
        """A fresh exception for the calling rank; each raiser gets its own, with its own traceback."""
        if self.kind == "lost":
            return PeerLostError(self.text, lost_ranks=[self.rank], rank=rank, group=group)
        if self.kind == "failed":
            return PeerFailedError(self.text, failed_ranks=[self.rank], rank=rank, group=group)
        if self.kind == "timeout":
            return CollectiveTimeoutError(self.text, rank=rank, group=group)
        if self.kind == "mismatch":
            return MismatchError(self.text, rank=rank, group=group)
        return GroupAbortedError(self.text, rank=rank, group=group)


class Fate:
    """The one place that knows whether a group still lives. Every thread of the group may call it."""

    def __init__(self, *, rank: int, group: str) -> None:
        self.rank = rank
        self.group = group
        self.failure: Failure | None = None
        self.goodbyes: dict[int, str] = {}
        self._changed = threading.Condition()
        self._on_failure: list[Callable[[Failure], None]] = []
        self._settled = threading.Event()  # everything that a failure entails is done
        self._settler = 0

    def on_failure(self, act: Callable[[Failure], None]) -> None:
        """`act` runs once, on the thread that finds the failure. It must not block."""
        with self._changed:
            self._on_failure.append(act)

    def fail(self, failure: Failure) -> Failure:
        """The first failure wins. Returns the one that did, when what it entails is done: no error reaches a caller
        while a late write of a peer could still change the caller's tensors."""
        with self._changed:
            first = self.failure
            if first is None:
                self.failure = failure
                self._settler = threading.get_ident()
            acts = list(self._on_failure)
            self._changed.notify_all()
        if first is not None:
            self._settle()
            return first
        for act in acts:
            try:
                act(failure)
            except Exception:
                log.exception("group %s: cleaning up after a failure failed", self.group)
        self._settled.set()
        return failure

    def _settle(self) -> None:
        if self._settler != threading.get_ident():
            self._settled.wait(_SETTLE_S)

    def goodbye(self, rank: int, text: str) -> None:
        with self._changed:
            self.goodbyes.setdefault(rank, text)
            self._changed.notify_all()

    def check(self) -> None:
        failure = self.failure
        if failure is not None:
            self._settle()
            raise failure.error(rank=self.rank, group=self.group)

    def explain(self, rank: int, during: str, *, timeout_s: float = 1.0) -> Failure:
        """Why the connection to `rank` closed. Waits for the verdict, which may be a few milliseconds behind."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or rank in self.goodbyes, timeout=timeout_s)
            if self.failure is not None:
                return self.failure
            said = self.goodbyes.get(rank)
        if said is not None:
            return Failure("lost", rank, f"rank {rank} has left the group ({said}) and is missing in {during}")
        return Failure("lost", rank, f"the connection to rank {rank} closed without a word during {during}")
