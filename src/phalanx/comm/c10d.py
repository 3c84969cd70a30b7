"""Any c10d process group (Gloo, NCCL, MPI, UCC, one written in Python) behind the `Group` interface."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.comm.board import Board
from phalanx.comm.board_group import Ledger
from phalanx.comm.device_group import DeviceGroup
from phalanx.comm.farewell import say_farewell_on
from phalanx.comm.group import DoneWork, ReduceKind, Work
from phalanx.comm.process_groups import backends_of, store_of, timeout_of
from phalanx.errors import CollectiveTimeoutError

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
    found = _known_adapter(process_group)
    if found is None:
        found = _adapters[id(process_group)] = C10dGroup(process_group)
    return found


def _known_adapter(process_group: dist.ProcessGroup) -> C10dGroup | None:
    found = _adapters.get(id(process_group))
    return found if found is not None and found.process_group is process_group else None


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


class C10dGroup(DeviceGroup):
    """A thin adapter: starts collectives on the process group, and turns its failures into causes."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(_ledger_of(process_group), process_group)
        self._backends = backends_of(process_group)
        if "phalanx" in self._backends.values():  # which hands CUDA tensors to NCCL, and returns NCCL's works
            self._backends["cuda"] = "nccl"
        self.averages = set(self._backends.values()) <= _AVERAGING_BACKENDS
        self._sums = {kind: _all_reduce_options(op) for kind, op in _OPS.items()}

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

    def adapter_of(self, process_group: dist.ProcessGroup) -> C10dGroup | None:
        return _known_adapter(process_group)

    def waits_on_streams(self, device: torch.device) -> bool:
        return (self._backends.get(device.type) or self._backends.get("")) in _STREAM_BACKENDS

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
        return _C10dWork(self, work, what, on_stream, marks=tensor.device if marks else None)

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


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options
