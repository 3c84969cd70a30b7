"""Any c10d process group (Gloo, NCCL, MPI, UCC, one written in Python) behind the `Group` interface."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.comm.board import Board, Poll
from phalanx.comm.farewell import say_farewell_on
from phalanx.comm.group import DoneWork, Group, ReduceKind, Undertaking, Work
from phalanx.errors import (
    CollectiveTimeoutError,
    GroupAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    PhalanxError,
)

# How long a wait goes on before it looks at the board, and again. A collective that ends wakes the waiter at once.
LOOK_EVERY_S = 0.2
logger = logging.getLogger(__name__)
_GUESSES = "killed, out of memory, or at its end after fewer steps?"
# A rank that dies takes its connections with it before its farewell can be read: how long survivors look for the cause.
CAUSE_WITHIN_S = 0.6
# A peer that died may have done its part before: what it sent is still on its way. After this time it is missed.
MISSED_AFTER_S = 1.0

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


@dataclass
class _Ledger:
    """What the ranks of a process group have said to each other so far. It lives as long as the process group: an
    adapter that is made anew must not take up an old exchange, on one rank and not on another."""

    board: Board | None
    turns: dict[str, int] = field(default_factory=dict)
    serials: Iterator[int] = field(default_factory=lambda: itertools.count(1))


_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ledger] = weakref.WeakKeyDictionary()
_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _ledger_of(process_group: dist.ProcessGroup) -> _Ledger:
    found = _ledgers.get(process_group)
    if found is None:
        size = process_group.size()
        board = Board(_store_of(process_group), rank=process_group.rank(), size=size) if size > 1 else None
        found = _ledgers[process_group] = _Ledger(board)
        if board is not None:
            say_farewell_on(board)
    return found


def group_of(process_group: dist.ProcessGroup) -> C10dGroup:
    """The one adapter of a process group: its board and its notices are shared by everything that uses the group."""
    found = _adapters.get(id(process_group))
    if found is None or found.process_group is not process_group:
        found = _adapters[id(process_group)] = C10dGroup(process_group)
    return found


def own_group(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group of the same ranks and backend. All its ranks call this together, and no other rank needs to.

    Two modules that share a group and see different unused parameters launch their buckets in different orders, and
    would add up each other's gradients with no error. A group of one's own makes order a matter of one module.
    """
    if process_group.size() == 1:
        return process_group
    ranks = dist.get_process_group_ranks(process_group)
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=_timeout_s(process_group)),
        backend=_backend_name(process_group),
        # Of all ranks, a group has a number of its own; of some, a name made from them, so that only they need to call.
        use_local_synchronization=process_group.size() != dist.get_world_size(),
        group_desc="phalanx.replicate",
    )
    assert isinstance(made, dist.ProcessGroup)
    _twins.setdefault(process_group, weakref.WeakSet()).add(made)
    return made


def release_group(process_group: dist.ProcessGroup) -> None:
    """Close a group that `own_group` made, on this rank: its sockets and threads would stay until the job's end.

    NCCL's is left to the end: closing a communicator is collective, and this is called when a model is collected. So is
    one of some ranks only: the next of the same ranks would get its name, and find its old addresses in the store.
    """
    known = distributed_c10d._world.pg_map
    if process_group not in known or process_group is dist.group.WORLD or process_group.size() != dist.get_world_size():
        return
    if "nccl" not in _backends_of(process_group).values():
        dist.destroy_process_group(process_group)


def own_groups_of(process_group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Those that `own_group` made as twins of this one, and that are still in use."""
    return [twin for twin in _twins.get(process_group, ()) if twin in distributed_c10d._world.pg_map]


def _timeout_s(process_group: dist.ProcessGroup) -> float:
    if (of_ours := getattr(process_group, "timeout_s", None)) is not None:
        return float(of_ours)
    try:
        device = next(iter(process_group._device_types))
        timeout = process_group._get_backend(device).options._timeout
        return float(timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


class _C10dWork(Work):
    def __init__(self, group: C10dGroup, work: Any, what: str, on_stream: bool) -> None:
        self._group = group
        self._work = work
        self._what = what
        self._on_stream = on_stream

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float | None = None) -> None:
        if self._on_stream:
            self._work.wait()
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


class C10dGroup(Group):
    """A thin adapter: starts collectives on the process group, and turns its failures into causes."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.name = process_group.group_name
        self._backends = _backends_of(process_group)
        self.averages = set(self._backends.values()) <= _AVERAGING_BACKENDS
        self.topics: set[str] = set()
        self.undertakings: list[Undertaking] = []
        self._aborted: str | None = None
        self._dead_since: dict[int, float] = {}
        self._sums = {kind: _all_reduce_options(op) for kind, op in _OPS.items()}
        ledger = _ledger_of(process_group)
        self.board = ledger.board
        self._exchanges = ledger.turns
        self._serials = ledger.serials

    @property
    def timeout_s(self) -> float:  # type: ignore[override]  # asked anew each time: `phalanx.set_timeout` may change it
        """How long its collectives wait for a peer."""
        return _timeout_s(self.process_group)

    def waits_on_streams(self, device: torch.device) -> bool:
        return (self._backends.get(device.type) or self._backends.get("")) in _STREAM_BACKENDS

    def next_serial(self) -> int:
        return next(self._serials)

    # -- collectives ---------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, kind: ReduceKind = "sum") -> Work:
        if self._aborted is not None:
            self._check_alive()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        try:  # as `_started`, without its calls: this runs once per bucket, beside a backward pass
            work = self.process_group.allreduce([tensor], self._sums[kind])
        except RuntimeError as error:
            raise self.explain(error, "all_reduce") from error
        return _C10dWork(self, work, "all_reduce", self.waits_on_streams(tensor.device))

    def all_reduce_sparse(self, tensor: torch.Tensor) -> tuple[Work, Callable[[], torch.Tensor]]:
        self._check_alive()
        mine = tensor.coalesce()
        if self.size == 1:
            return DoneWork(), lambda: mine
        if self._backend_for(mine) in _SPARSE_BACKENDS and not mine.is_complex():
            work = self._started(lambda: self.process_group.allreduce([mine]), "all_reduce of a sparse tensor", mine)
            return work, mine.coalesce
        total = self._gathered_sum(mine)
        return DoneWork(), lambda: total

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        self._check_alive()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self._started(lambda: self.process_group.broadcast([whole], options), "broadcast", whole)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Work:
        self._check_alive()
        return self._started(lambda: self.process_group.allgather([list(outputs)], [tensor]), "all_gather", tensor)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._check_alive()
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

    def _started(self, start: Callable[[], Any], what: str, tensor: torch.Tensor) -> Work:
        try:
            return _C10dWork(self, start(), what, self.waits_on_streams(tensor.device))
        except RuntimeError as error:
            raise self.explain(error, what) from error

    def _backend_for(self, tensor: torch.Tensor) -> str:
        return self._backends.get(tensor.device.type) or self._backends.get("", "unknown")

    def _gathered_sum(self, mine: torch.Tensor) -> torch.Tensor:
        """For backends without sparse reduction: gather what every rank has, padded to the longest, and add it up."""
        indices, values = mine.indices(), mine.values()
        counts = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.size)]
        self.all_gather(counts, torch.tensor([indices.shape[1]], device=values.device)).wait()
        lengths = [int(count.item()) for count in counts]
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
            check_invariants=False,
        ).coalesce()

    # -- agreement and causes ------------------------------------------------------------------------------------

    def exchange(self, label: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        if self.board is None:
            return [payload]
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

    def abort(self, reason: str) -> None:
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

    def check_notices(self) -> None:
        """Raise what the board says of this group or of what this rank is at."""
        self._check_alive()
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
                self._check_alive()
            elif notice.kind == "left":
                raise PeerLostError(
                    f"rank {notice.rank} left: {notice.reason}",
                    lost_ranks=(notice.rank,),
                    rank=self.rank,
                    group=self.name,
                )
            elif not notice.topic or self.is_at(notice.topic):
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

    def _check_alive(self) -> None:
        if self._aborted is not None:
            raise GroupAbortedError(f"the group was aborted: {self._aborted}", rank=self.rank, group=self.name)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(str(rank) for rank in ranks)


def _backends_of(process_group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device; under "" the one for all, where the group names only one.

    A group made as another's twin names its backend in the long form, ``cpu:gloo,cuda:nccl``, also where both are one.
    """
    try:
        config = str(dist.get_backend(process_group))
        if ":" not in config:
            config = str(dist.get_backend_config(process_group))
    except (ValueError, RuntimeError, AttributeError):
        config = str(getattr(process_group, "name", lambda: "unknown")())
    if ":" not in config:
        return {"": config.lower()}
    return {device: name for device, _, name in (part.lower().partition(":") for part in config.split(","))}


def _backend_name(process_group: dist.ProcessGroup) -> str:
    """As `new_group` takes it. Where all devices have the same: a group that names it for each warns when it is closed."""
    config = str(dist.get_backend_config(process_group)) if hasattr(dist, "get_backend_config") else ""
    names = {part.partition(":")[2] for part in config.split(",")} - {""}
    if len(names) > 1:
        return config
    return names.pop() if names else str(dist.get_backend(process_group))


def _store_of(process_group: dist.ProcessGroup) -> dist.Store:
    known = distributed_c10d._world.pg_map.get(process_group)
    if known is not None and known[1] is not None:
        return known[1]
    return dist.PrefixStore(process_group.group_name, distributed_c10d._get_default_store())


def _all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options
