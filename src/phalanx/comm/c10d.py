"""Any c10d process group (Gloo, NCCL, MPI, UCC, one written in Python) behind the `Group` interface."""

from __future__ import annotations

import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.comm import lookout
from phalanx.comm.board import Board
from phalanx.comm.board_group import BoardGroup, Ledger
from phalanx.comm.device_wait import await_stream
from phalanx.comm.farewell import say_farewell_on
from phalanx.comm.group import DoneWork, Queued, ReduceKind, Work
from phalanx.comm.process_groups import accelerator_of, backends_of, store_of, timeout_of
from phalanx.errors import CollectiveTimeoutError, PhalanxError, ranks_behind

logger = logging.getLogger(__name__)

# How long a wait goes on before it looks at the board, and again. A collective that ends wakes the waiter at once.
LOOK_EVERY_S = 0.2

_OPS: dict[ReduceKind, Any] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_AVERAGING_BACKENDS = {"nccl", "phalanx", "xccl"}
_SPARSE_BACKENDS = {"gloo", "phalanx"}
_STREAM_BACKENDS = {"nccl", "xccl"}  # a wait only makes the current stream wait

# How long a communicator's abort is waited for: it goes on by itself, but what comes then may need it.
ABORTED_WITHIN_S = 1.0

_given_up: set[C10dGroup] = set()  # those that use such a group later are to be told why it is of no use
_adapters: weakref.WeakValueDictionary[int, C10dGroup] = weakref.WeakValueDictionary()
_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, Ledger] = weakref.WeakKeyDictionary()


def _ledger_of(process_group: dist.ProcessGroup) -> Ledger:
    found = _ledgers.get(process_group)
    if found is None:
        size = process_group.size()
        board = Board(store_of(process_group), rank=process_group.rank(), size=size) if size > 1 else None
        found = _ledgers[process_group] = Ledger(board)
        if board is not None:
            say_farewell_on(board)
    return found


def group_of(process_group: dist.ProcessGroup) -> C10dGroup:
    """The one adapter of a process group: its board and its notices are shared by everything that uses the group."""
    found = _adapters.get(id(process_group))
    if found is None or found.process_group is not process_group:
        found = _adapters[id(process_group)] = C10dGroup(process_group)
    return found


class _C10dWork(Work):
    def __init__(
        self, group: C10dGroup, work: Any, what: str, on_stream: bool, *, marks: torch.device | None = None
    ) -> None:
        self._group = group
        self._work = work
        self._what = what
        self._on_stream = on_stream
        self._marks = marks

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float | None = None) -> None:
        if self._on_stream:
            self._work.wait()
            if self._marks is not None:
                self._group.mark(self._marks)
            return
        began = time.monotonic()
        while True:
            try:
                self._work.wait(timedelta(seconds=LOOK_EVERY_S))
                return
            except RuntimeError:
                if self._work.is_completed():  # it failed, or it ended well just after this look
                    self._wait_for_completed()
                    return
            self._group.check_notices()
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                raise CollectiveTimeoutError(
                    f"{self._what} did not finish within {timeout_s:g} s",
                    rank=self._group.rank,
                    group=self._group.name,
                )

    def _wait_for_completed(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._group.explain(error, self._what) from error


class C10dGroup(BoardGroup):
    """A thin adapter: starts collectives on the process group, and turns its failures into causes."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(
            _ledger_of(process_group),
            rank=process_group.rank(),
            size=process_group.size(),
            name=process_group.group_name,
        )
        self.process_group = process_group
        self._backends = backends_of(process_group)
        if "phalanx" in self._backends.values():  # which hands CUDA tensors to NCCL, and returns NCCL's works
            self._backends["cuda"] = "nccl"
        self.averages = set(self._backends.values()) <= _AVERAGING_BACKENDS
        self._sums = {kind: _all_reduce_options(op) for kind, op in _OPS.items()}
        self._has_aborted = False  # this rank, and not another
        self._queued: tuple[weakref.ref[Queued], ...] = ()  # another each time: another thread reads it
        self._marks: dict[torch.device, lookout.Marks] = {}

    @property
    def timeout_s(self) -> float:  # type: ignore[override]  # asked anew each time: `phalanx.set_timeout` may change it
        """How long its collectives wait for a peer."""
        return timeout_of(self.process_group)

    def lacks_backend_for(self, kind: str, held: str) -> str | None:
        """What to say of something that lies on a kind of device for which the process group has no backend."""
        if "" in self._backends or kind in self._backends:
            return None
        there = ", ".join(f"{device}: {backend}" for device, backend in self._backends.items())
        known = " or ".join(self._backends)
        return (
            f"No backend type associated with device type {kind}: {held} is on {kind}, and the process group carries "
            f"{known} tensors alone ({there}). Move the module to {known} first, or begin with phalanx.init(), whose group "
            "carries both"
        )

    def waits_on_streams(self, device: torch.device) -> bool:
        return (self._backends.get(device.type) or self._backends.get("")) in _STREAM_BACKENDS

    def read(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.is_cuda:
            self.await_device(tensor.device)
        return super().read(tensor)

    # -- a device that waits in vain -------------------------------------------------------------------------------

    def await_device(self, device: torch.device) -> None:
        if self.size == 1 or device.type != "cuda" or not self.waits_on_streams(device):
            super().await_device(device)
            return
        try:
            await_stream(device, self.check_notices)
        except PhalanxError as error:  # the device still waits, and whoever waits for it next
            self.give_up(error)
            raise
        self.check_alive()

    def mark(self, device: torch.device) -> None:
        if self.size == 1 or device.type != "cuda" or not self.waits_on_streams(device):
            return
        if torch.cuda.is_current_stream_capturing():  # it would come with each replay, and not now
            return
        marks = self._marks.get(device)
        if marks is None:
            marks = self._marks[device] = lookout.Marks(device, self.watch)
        marks.queue(self.topics.union(*(undertaking.topics for undertaking in self.undertakings)))

    def watch(self, queued: Queued) -> None:
        if self.size > 1:
            self._queued = (*(ref for ref in self._queued if ref() not in (None, queued)), weakref.ref(queued))
            lookout.watch(self)

    def unwatch(self, queued: Queued) -> None:
        self._queued = tuple(ref for ref in self._queued if ref() not in (None, queued))

    def queued(self) -> list[Queued]:
        return [queued for ref in self._queued if (queued := ref()) is not None]

    @property
    def is_given_up(self) -> bool:
        return self._has_aborted

    @property
    def is_closed(self) -> bool:
        return self.process_group not in distributed_c10d._world.pg_map

    def give_up(self, cause: PhalanxError) -> None:
        """Abort the communicator of this rank, which waits in vain. Others find out by themselves, or are not concerned."""
        if not self._has_aborted and self.size > 1:
            self._give_up_for(cause, f"what is queued on the device waits in vain, and is broken off: {cause}")

    def give_up_others(self) -> None:
        cause = self._given_up_for
        all_ranks = dist.get_process_group_ranks(self.process_group)
        concerned = {all_ranks[rank] for rank in ranks_behind(cause) if rank < self.size}
        if cause is None or not concerned:
            return
        for other in list(distributed_c10d._world.pg_map):
            if other is self.process_group or not concerned.issubset(dist.get_process_group_ranks(other)):
                continue
            said = f"the device waits on: group {other.group_name} is given up, too"
            known = _adapters.get(id(other))  # none is made here: ranks make them alike
            if known is None:
                _abort(other, f"rank {self.rank}: {said}")
            elif not known.is_given_up:
                known._give_up_for(cause, said)

    def _give_up_for(self, cause: PhalanxError, said: str) -> None:
        self._given_up_for = copy.copy(cause).with_traceback(None)
        self._aborted = str(cause)
        self._has_aborted = True
        _given_up.difference_update([group for group in _given_up if group.is_closed])
        _given_up.add(self)
        _abort(self.process_group, f"rank {self.rank}: {said}")

    # -- leaving -----------------------------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        if self._has_aborted:
            return
        self._has_aborted = True
        self._aborted = reason
        if self.board is not None:
            self.board.post("aborted", "", reason)
        own = getattr(self.process_group, "abort", None)
        backends = set(self._backends.values())
        if own is not None and backends & {"phalanx", *_STREAM_BACKENDS}:
            try:
                own(reason) if "phalanx" in backends else own()
            except (RuntimeError, TypeError):
                return  # waiters look at the board anyway

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> Work:
        if self._aborted is not None:
            self.check_alive()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        try:  # as `_started`, without its calls: this runs once per bucket, beside a backward pass
            work = self.process_group.allreduce([tensor], self._sums[kind])
        except RuntimeError as error:
            raise self.explain(error, "all_reduce") from error
        return _C10dWork(self, work, "all_reduce", self.waits_on_streams(tensor.device))

    def all_reduce_sparse(self, tensor: torch.Tensor) -> tuple[Work, Callable[[], torch.Tensor]]:
        self.check_alive()
        mine = tensor.coalesce()
        if self.size == 1:
            return DoneWork(), lambda: mine
        if self._backend_for(mine) in _SPARSE_BACKENDS and not mine.is_complex():
            work = self._started(lambda: self.process_group.allreduce([mine]), "all_reduce of a sparse tensor", mine)
            return work, mine.coalesce
        total = self._gathered_sum(mine)
        return DoneWork(), lambda: total

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self.check_alive()
        self.await_broken_passes()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        # Buffers of a forward pass, say: the next thing that a script does may be to read its loss.
        return self._started(lambda: self.process_group.broadcast([whole], options), "broadcast", whole, marks=True)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Work:
        self.check_alive()
        self.await_broken_passes()
        return self._started(lambda: self.process_group.allgather([list(outputs)], [tensor]), "all_gather", tensor)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.check_alive()
        own = getattr(self.process_group, "allocate", None)
        if own is not None and device.type == "cpu" and self.size > 1:
            try:
                made = own(numel, dtype)
            except RuntimeError as error:
                raise self.explain(error, "allocate") from error
            assert isinstance(made, torch.Tensor)
            return made
        return torch.empty(numel, dtype=dtype, device=device)

    def release(self, tensor: torch.Tensor) -> None:
        own = getattr(self.process_group, "release", None)
        if own is not None and tensor.device.type == "cpu" and self.size > 1:
            own(tensor)

    def _started(self, start: Callable[[], Any], what: str, tensor: torch.Tensor, *, marks: bool = False) -> Work:
        on_stream = self.waits_on_streams(tensor.device)
        try:
            work = start()
        except RuntimeError as error:
            raise self.explain(error, what) from error
        return _C10dWork(self, work, what, on_stream, marks=tensor.device if marks and on_stream else None)

    def _backend_for(self, tensor: torch.Tensor) -> str:
        return self._backends.get(tensor.device.type) or self._backends.get("", "unknown")

    def _gathered_sum(self, mine: torch.Tensor) -> torch.Tensor:
        """For backends without sparse reduction: gather what every rank has, padded to the longest, and add it up."""
        indices, values = mine.indices(), mine.values()
        counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.size)]
        self.all_gather(counts, torch.tensor([indices.shape[1]], device=values.device)).wait()
        lengths = [int(length) for length in self.read(torch.cat(counts))]
        longest = max(lengths)
        if longest == 0:
            return mine
        padded_indices = indices.new_zeros((longest, indices.shape[0]))
        padded_indices[: lengths[self.rank]] = indices.t()
        padded_values = values.new_zeros((longest, *values.shape[1:]))
        padded_values[: lengths[self.rank]] = values
        all_indices = [torch.empty_like(padded_indices) for _ in lengths]
        all_values = [torch.empty_like(padded_values) for _ in lengths]
        self.all_gather(all_indices, padded_indices).wait()
        if values.is_complex():
            self.all_gather([torch.view_as_real(v) for v in all_values], torch.view_as_real(padded_values)).wait()
        else:
            self.all_gather(all_values, padded_values).wait()
        return torch.sparse_coo_tensor(
            torch.cat([part[:n] for part, n in zip(all_indices, lengths, strict=True)]).t(),
            torch.cat([part[:n] for part, n in zip(all_values, lengths, strict=True)]),
            mine.shape,
            device=values.device,
            check_invariants=False,
        ).coalesce()


def _abort(process_group: dist.ProcessGroup, said: str) -> None:
    """Abort the communicator of a process group, if it has one, and then log why.

    In a thread of its own: it may wait for the device, which another communicator may keep from going on; and for the lock
    of logging, which one who waits for the device may hold.
    """
    backend = accelerator_of(process_group)

    def abort() -> None:
        try:
            if backend is not None:
                backend.abort()
        except RuntimeError as error:
            logger.warning("could not abort the communicator of group %s: %s", process_group.group_name, error)
        logger.error(said)

    thread = threading.Thread(target=abort, name="phalanx-abort", daemon=True)
    thread.start()
    thread.join(ABORTED_WITHIN_S)


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options
