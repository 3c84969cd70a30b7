"""The one exception family of Phalanx.

A user's mistake raises ``ValueError`` or ``TypeError``. What goes wrong at run time raises one of these, and each says
where: which rank, which group, which step, which bucket and which parameter, as far as the raiser knows.
"""

from __future__ import annotations

from collections.abc import Sequence


class PhalanxError(RuntimeError):
    """Base of every run-time fault. Keyword arguments become attributes and are shown behind the message."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        group: str | None = None,
        step: int | None = None,
        bucket: int | None = None,
        parameters: Sequence[str] = (),
    ) -> None:
        self.message = message
        self.rank = rank
        self.group = group
        self.step = step
        self.bucket = bucket
        self.parameters = tuple(parameters)
        where = [
            f"{label} {value}"
            for label, value in (("rank", rank), ("group", group), ("step", step), ("bucket", bucket))
            if value is not None
        ]
        if self.parameters:
            shown = ", ".join(self.parameters[:3]) + (" …" if len(self.parameters) > 3 else "")
            where.append(f"parameters {shown}" if len(self.parameters) > 1 else f"parameter {shown}")
        super().__init__(f"{message} [{', '.join(where)}]" if where else message)


class MismatchError(PhalanxError):
    """Ranks disagree on what they must agree on: models, collectives, shapes, options."""


class PeerLostError(PhalanxError):
    """Another rank of the group is gone: it died, left, or its connection broke."""

    def __init__(self, message: str, *, lost_ranks: Sequence[int] = (), **where: object) -> None:
        self.lost_ranks = tuple(lost_ranks)
        super().__init__(message, **where)  # type: ignore[arg-type]


class PeerFailedError(PhalanxError):
    """Another rank raised an exception in the work that all ranks share; its text is in the message."""

    def __init__(self, message: str, *, failed_ranks: Sequence[int] = (), **where: object) -> None:
        self.failed_ranks = tuple(failed_ranks)
        super().__init__(message, **where)  # type: ignore[arg-type]


class GroupAbortedError(PhalanxError):
    """The group was aborted on purpose, here or on another rank; the message carries the reason."""


class CollectiveTimeoutError(PhalanxError, TimeoutError):
    """A collective did not finish in its time; names who was waited for, where that is known."""


class ReducerStateError(PhalanxError):
    """The reducer was driven in an order that cannot give right gradients."""


class UnsynchronizedStepError(PhalanxError):
    """An optimizer is about to step on gradients that were never averaged."""


class OutOfDataError(PhalanxError):
    """A rank ran out of data before the others, where the user asked for an error in that case."""

    def __init__(self, message: str, *, out_ranks: Sequence[int] = (), **where: object) -> None:
        self.out_ranks = tuple(out_ranks)
        super().__init__(message, **where)  # type: ignore[arg-type]


def ranks_behind(error: PhalanxError | None) -> tuple[int, ...]:
    """The ranks that an error says are gone or have failed; none where it says of no rank."""
    if isinstance(error, PeerLostError):
        return error.lost_ranks
    return error.failed_ranks if isinstance(error, PeerFailedError) else ()
