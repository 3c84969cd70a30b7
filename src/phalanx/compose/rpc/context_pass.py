"""One backward pass in a context: gradients arrive there, leave in buckets, and are overwritten by their averages."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

from phalanx import events
from phalanx.comm.group import Work
from phalanx.compose.rpc.agreement import Phase, Row, Status, Verdict
from phalanx.compose.rpc.rounds import WITHIN_S, Parcel, Rounds
from phalanx.errors import PeerFailedError, PhalanxError, ReducerStateError
from phalanx.hooks.call import WeakHookCall
from phalanx.hooks.grad_bucket import GradBucket
from phalanx.reducer.bucket import Bucket
from phalanx.reducer.carrier import as_sparse

_ID_BITS = 48  # of a context's id; above them is the worker that opened it
NOBODY = -1  # the context of a rank that has none


class ContextPass:
    """Announced by a forward pass in a context, over when the context's graph task is.

    Ordinarily buckets leave as they fill, and whether all ranks were at the same pass is found at the end: if not, the
    round is repeated. With a communication hook, or where unused parameters are looked for, ranks ask first.
    """

    def __init__(
        self,
        rounds: Rounds,
        context: int,
        siblings: dict[int, ContextPass],
        *,
        divisor: int | None,
        finds_unused: bool,
        number: int,
    ) -> None:
        self.context = context
        self.is_over = False
        self._rounds = rounds
        self._siblings = siblings
        self._number = number
        self._divisor = divisor
        self._hook = rounds.engine.bucket_hook
        self._averages = rounds.group.averages and divisor is None and self._hook is None
        self._finds_unused = finds_unused
        self._asks_first = finds_unused or self._hook is not None
        self._lock = threading.RLock()
        self._local: set[int] = set()
        self._expected = set() if finds_unused else set(range(len(rounds.specs)))
        self._arrived: set[int] = set()
        self._problem: ReducerStateError | None = None
        self._parcels: list[Parcel] = []
        self._num_sent = 0
        self._works: list[Work] = []
        self._sums: dict[int, Callable[[], torch.Tensor]] = {}
        self._told: torch.Tensor | None = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def agree_on_use(self, used: set[int], *, out: bool = False) -> list[int]:
        """Tell the others which parameters this forward pass used; returns those that only others have used. Collective."""
        self._local |= used
        used_here = [int(index in self._local) for index in range(len(self._rounds.specs))]
        status = Status.OUT if out else Status.OK
        self._take_floor()
        try:
            counts = self._settled(lambda: self._send_row(Phase.FORWARD, status, used_here))
        finally:
            self._rounds.floor.release(self.context)
        self._expected |= {index for index, count in enumerate(counts) if count}
        absent = sorted(self._expected - self._local)
        self._local |= set(absent)
        return absent

    # -- backward --------------------------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        """A gradient has come to the context. Threads of one pass may come here at the same time."""
        with self._lock:
            if self.is_over:
                return
            self._arrived.add(index)
            if events.listeners:
                slot = self._rounds.engine.slots[index]
                events.emit(events.GradientReady(self._title, self._number, slot.name, self._rounds.bucket_of[index]))
            if self._asks_first or self._rounds.group.size == 1 or not self._is_full(self._num_sent):
                return
            if not self._rounds.draining and self._rounds.floor.try_take(self.context):
                gradients = self._gradients()
                while self._num_sent < len(self._rounds.plan) and self._is_full(self._num_sent):
                    self._send(self._num_sent, gradients)

    def _is_full(self, bucket: int) -> bool:
        plan = self._rounds.plan
        return bucket < len(plan) and all(
            index in self._arrived or index not in self._expected for index in plan[bucket].parameters
        )

    def send_rest(self) -> None:
        """The pass is over on this rank: what has not come will not."""
        missing = sorted(self._expected - self._arrived)
        if missing:
            self._problem = self._missing(missing)
        with self._lock:
            self._take_floor()
            self._send_round(Status.MISSING if missing else Status.OK)

    def finish(self) -> None:
        """Wait for the others, and write the averages into the context."""
        try:
            if self._told is not None:
                self._settled(lambda: self._send_round(Status.OK), sent=True)
                if self._asks_first:
                    self._send_after_asking()
                self._hand_out()
                if events.listeners:
                    events.emit(events.StepFinalized(self._title, self._number, 0.0))
        except PhalanxError:
            if self._problem is not None:
                raise self._problem from None
            raise
        finally:
            self._close()

    def shadow(self) -> None:
        """Take part in the others' pass with nothing. Collective."""
        try:
            if self._finds_unused:
                self.agree_on_use(set(), out=True)
            self._take_floor()
            self._send_round(Status.OUT)
            self._settled(lambda: self._send_round(Status.OUT), sent=True)
            if self._asks_first:
                self._send_after_asking()
        finally:
            self._close()

    @property
    def has_begun(self) -> bool:
        return bool(self._arrived)

    def abandon(self) -> None:
        """The pass raised, here or on another worker: give the others their round, marked as failed."""
        with self._lock:  # two threads may come here: the one that drops the graph task, and the next forward pass's
            if self.is_over:
                return
            try:
                if self._rounds.broken is None:
                    self._take_floor()
                    self._send_round(Status.RAISED)
                    self._rounds.draining += self._works
                    self._parcels = []  # still on their way
            except PhalanxError as error:
                self._rounds.break_off(error)
            finally:
                self._close()

    # -- a round ---------------------------------------------------------------------------------------------------

    def _take_floor(self) -> None:
        if self._rounds.broken is not None:
            raise copy.copy(self._rounds.broken)
        self._rounds.floor.take(self.context, timeout_s=WITHIN_S)
        self._rounds.drain()

    def _send_round(self, status: Status) -> None:
        if not self._asks_first:
            gradients = self._gradients() if status in (Status.OK, Status.MISSING) else {}
            for bucket in range(self._num_sent, len(self._rounds.plan)):
                self._send(bucket, gradients)
        self._send_row(Phase.BACKWARD, status, [0] * len(self._rounds.specs) if self._finds_unused else None)

    def _send_row(self, phase: Phase, status: Status, used: list[int] | None) -> None:
        is_own = self.context == NOBODY or self.context >> _ID_BITS == rpc.get_worker_info().id
        older = list(self._siblings)
        place = older.index(self.context) if self.context in older else 0
        row = Row(self.context, is_own, place, phase, status)
        self._told, works = self._rounds.send_row(row, used)
        self._works += works

    def _settled(self, send: Callable[[], None], *, sent: bool = False) -> list[int]:
        """Send, and send again behind others' passes until all ranks are at this one."""
        rounds = self._rounds
        while True:
            if not sent:
                send()
            sent = False
            rounds.wait(self._works)
            assert self._told is not None
            verdict, counts = rounds.judged(self._told)
            self._works = []
            if verdict.first is None:
                self._raise_for(verdict)
                return counts
            self._num_sent = 0
            rounds.floor.release(self.context, promise=verdict.first)
            self._take_floor()

    def _raise_for(self, verdict: Verdict) -> None:
        if not verdict.problem:
            return
        rank, step = self._rounds.group.rank, self._number
        error: PhalanxError = ReducerStateError(verdict.problem, rank=rank, step=step)
        if verdict.failed:
            error = PeerFailedError(verdict.problem, failed_ranks=verdict.failed, rank=rank, step=step)
        if verdict.is_final:
            self._rounds.broken = copy.copy(error)
        raise error

    def _send_after_asking(self) -> None:
        gradients = self._gradients() if self.context != NOBODY else {}
        for bucket in range(len(self._rounds.plan)):
            if self._hook is not None:
                self._run_hook(bucket, gradients)
            else:
                self._send(bucket, gradients)
        self._rounds.wait(self._works)

    # -- buckets ---------------------------------------------------------------------------------------------------

    def _gradients(self) -> dict[int, torch.Tensor]:
        found = dist_autograd.get_gradients(self.context)
        return {id(parameter): gradient for parameter, gradient in found.items()}

    def _send(self, bucket: int, gradients: dict[int, torch.Tensor]) -> None:
        self._num_sent = bucket + 1
        rounds = self._rounds
        if rounds.group.size == 1 or self._expected.isdisjoint(rounds.plan[bucket].parameters):
            return
        if events.listeners:
            num_bytes = rounds.plan[bucket].num_bytes
            events.emit(events.BucketLaunched(self._title, self._number, bucket, num_bytes))
        parcel = self._filled(bucket, gradients)
        if parcel.spec.sparse:
            work, self._sums[bucket] = rounds.group.all_reduce_sparse(self._sparse(parcel, gradients) * self._share)
        else:
            work = rounds.group.all_reduce(parcel.buffer, "avg" if self._averages else "sum")
        self._works.append(work)

    @property
    def _share(self) -> float:
        return 1.0 / (self._divisor or self._rounds.group.size)

    def _filled(self, bucket: int, gradients: dict[int, torch.Tensor]) -> Parcel:
        self._parcels = self._parcels or self._rounds.borrow()
        parcel = self._parcels[bucket]
        undivided = self._averages or self._hook is not None
        real = parcel.spec.dtype.to_real() if parcel.spec.dtype.is_complex else parcel.spec.dtype
        wide = torch.promote_types(real, torch.float32)
        scale = torch.tensor(1.0 if undivided else self._share, dtype=wide, device="cpu")
        with torch.no_grad():
            for view, slot in zip(parcel.views, parcel.slots, strict=False):  # a sparse one has no views
                gradient = gradients.get(id(slot.parameter))
                if gradient is None:
                    view.zero_()
                else:
                    torch.mul(gradient.to_dense() if gradient.is_sparse else gradient, scale, out=view)
        return parcel

    def _sparse(self, parcel: Parcel, gradients: dict[int, torch.Tensor]) -> torch.Tensor:
        (slot,) = parcel.slots
        return as_sparse(slot, gradients.get(id(slot.parameter)))

    def _run_hook(self, bucket: int, gradients: dict[int, torch.Tensor]) -> None:
        """One after the other: what a hook starts when its first collective is over must not come between another's."""
        hook = self._hook
        assert isinstance(hook, WeakHookCall)
        parcel = self._filled(bucket, gradients)
        buffer = self._sparse(parcel, gradients).coalesce() if parcel.spec.sparse else parcel.buffer
        is_last = bucket == len(self._rounds.plan) - 1
        # A hook asks a bucket for its index, its slots and its spec alone.
        value = hook.start(GradBucket(cast(Bucket, parcel), buffer, is_last=is_last)).wait()
        value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if parcel.spec.sparse:
            self._sums[bucket] = lambda: value
        elif value.data_ptr() != buffer.data_ptr():
            buffer.copy_(value.view(-1))

    def _hand_out(self) -> None:
        if not self._parcels:
            return  # alone in the group
        gradients = self._gradients()
        with torch.no_grad():
            for parcel in self._parcels:
                total = self._sums.get(parcel.index)
                averages: Iterable[torch.Tensor] = parcel.views if total is None else (total(),)
                for slot, average in zip(parcel.slots, averages, strict=False):
                    if slot.index in self._expected and (mine := gradients.get(id(slot.parameter))) is not None:
                        _write(average, mine)

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"{self._rounds.engine.name} (in a context)"

    def _missing(self, indices: list[int]) -> ReducerStateError:
        names = [self._rounds.engine.slots[index].name for index in indices]
        error = ReducerStateError(
            f"the backward pass of context {self.context} brought no gradient for {len(names)} of "
            f"{len(self._rounds.specs)} parameters. Pass find_unused_parameters=True if forward does not use all of "
            "them, and make sure that all that forward returns takes part in the loss",
            rank=self._rounds.group.rank,
            parameters=names,
        )
        self._rounds.engine.on_error(str(error))
        return error

    def _close(self) -> None:
        self.is_over = True
        self._siblings.pop(self.context, None)
        parcels, self._parcels = self._parcels, []
        self._works, self._sums = [], {}
        if self._rounds.broken is None:
            self._rounds.give_back(parcels)
        self._rounds.floor.release(self.context)


def _write(average: torch.Tensor, place: torch.Tensor) -> None:
    """Over a gradient in the context, whose tensor others hold: in place, dense or sparse as it is."""
    if average.is_sparse == place.is_sparse:
        place.copy_(average)
    elif place.is_sparse:
        place.copy_(average.to_sparse(place.sparse_dim()))
    else:
        place.copy_(average.to_dense())
