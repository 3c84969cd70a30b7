"""What the layers above need of a group of ranks: a small interface, so that any transport can stand behind it."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, Protocol

import torch

from phalanx.errors import CollectiveTimeoutError, PhalanxError

ReduceKind = Literal["sum", "avg", "max", "min"]


class Work(ABC):
    """A collective under way. Waiting is local; that all ranks started the same collective is their contract."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result may be used by this rank (on CUDA: by the current stream), or raise the cause."""

    @abstractmethod
    def done(self) -> bool: ...

    def ended_within(self, timeout_s: float) -> bool:
        """Wait so long at most. Raises what went wrong with it, but not that it takes longer."""
        try:
            self.wait(timeout_s)
        except CollectiveTimeoutError:
            if not self.done():
                return False
            self.wait()  # it ended just after, well or with a time-out of its own
        return True

    def then(self, action: Callable[[], None]) -> Work:
        """A work that is this one followed by `action`, which runs once, in whichever thread waits first."""
        return _Chained(self, action)


class DoneWork(Work):
    """What a collective returns when there was nothing to wait for."""

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def done(self) -> bool:
        return True


class DeferredWork(Work):
    """A collective that is not to start before it is waited for."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start
        self._work: Work | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._work is None:
            self._work = self._start()
        self._work.wait(timeout_s)

    def done(self) -> bool:
        return self._work is not None and self._work.done()


class _Chained(Work):
    def __init__(self, first: Work, action: Callable[[], None]) -> None:
        self._first = first
        self._action: Callable[[], None] | None = action

    def wait(self, timeout_s: float | None = None) -> None:
        self._first.wait(timeout_s)
        action, self._action = self._action, None
        if action is not None:
            action()

    def done(self) -> bool:
        return self._action is None


class Undertaking(Protocol):
    """What ranks do together, and may fail in."""

    @property
    def topics(self) -> Iterable[str]: ...


class Passes(Protocol):
    """Backward passes that send on a group. One that broke off may still have to, in another thread than its caller's."""

    def await_broken(self) -> None:
        """Outside of any pass: return when what one that broke off has to send was sent."""


class Queued(Protocol):
    """What this rank has queued on a device, and needs its peers for."""

    @property
    def queued_topics(self) -> Iterable[str]:
        """As what its peers may have said that they fail in it."""

    @property
    def turn(self) -> int:
        """Another number each time that something is queued."""

    def is_over(self) -> bool:
        """Asked by another thread, at any time: whether the device has come to its end."""


class Group(ABC):
    """Ranks that communicate. All collectives must be called by every rank of the group, in the same order."""

    rank: int
    size: int
    name: str
    averages: bool
    """Whether `all_reduce(…, "avg")` exists and costs no extra pass."""
    topics: set[str]
    """What this rank is at: failures that others post on these topics wake its waits."""
    undertakings: list[Undertaking]
    """Likewise, of what has other topics each time: they are asked for when something was posted."""
    passes: weakref.WeakSet[Passes]
    """Backward passes of this process that send on this group."""
    timeout_s: float = math.inf
    """How long its collectives wait for a peer."""

    def is_at(self, topic: str) -> bool:
        """Whether this rank is at what others name so."""
        return topic in self.topics or any(topic in undertaking.topics for undertaking in self.undertakings)

    def waits_on_streams(self, device: torch.device) -> bool:
        """Whether waiting for a work on this device makes its current stream wait, and not the host."""
        return False

    def read(self, tensor: torch.Tensor) -> list[Any]:
        """The numbers that a collective has left in a tensor, on the host, once its work was waited for.

        Where streams wait for works, the tensor's own methods would wait within CUDA, whoever is gone; this raises then.
        """
        numbers: list[Any] = tensor.tolist()
        return numbers

    def await_device(self, device: torch.device) -> None:
        """Return when a device has come to the end of its current stream; raise if the works in it will never be over."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def watch(self, queued: Queued) -> None:
        """From now on, weakly: if this is not over, and some rank has said or shown that it never will be, have the device
        go on without. The host may be waiting for it."""
        return None

    def unwatch(self, queued: Queued) -> None:
        return None

    def mark(self, device: torch.device) -> None:
        """Likewise of all that is queued on a device's current stream now: somebody may wait for it before we do."""
        return None

    def give_up(self, cause: PhalanxError) -> None:
        """What this rank has queued on a device will never be over: have it go on. The group is of no use afterwards."""
        return None

    @abstractmethod
    def next_serial(self) -> int:
        """A number that grows with each call. Ranks that use the group alike get alike numbers, and can name things."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> Work: ...

    @abstractmethod
    def all_reduce_sparse(self, tensor: torch.Tensor) -> tuple[Work, Callable[[], torch.Tensor]]:
        """Sum sparse COO tensors. The second value gives the coalesced sum, once the work was waited on."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work: ...

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Work: ...

    @abstractmethod
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat, uninitialised tensor that this group reduces at the least cost. All ranks allocate alike, in order."""

    @abstractmethod
    def release(self, tensor: torch.Tensor) -> None:
        """Say that a tensor from `allocate` is no longer needed. All ranks release alike, in order."""

    @abstractmethod
    def exchange(self, label: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        """Every rank's payload, in order of ranks. Needs no tensor, device or equal sizes; for rare agreements.

        A rank that does not come within `timeout_s` is named in the error.
        """

    @abstractmethod
    def post_failure(self, topic: str, reason: str) -> None:
        """Tell whoever waits in this group, now or later, that this rank fails in `topic` and will not come."""

    @abstractmethod
    def failure_of(self, rank: int, topic: str) -> str | None:
        """What `rank` posted as the cause of its failure in `topic`, if it did."""

    @abstractmethod
    def check_notices(self, also: Collection[str] = ()) -> None:
        """Raise what others have said of this group, of what this rank is at or of topics that it was at before, or that
        one of them is gone."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise why the group is of no use any more, if it is. Costs nothing."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Wake all waiters, on every rank, with an error that carries the reason. The group is of no use afterwards."""
