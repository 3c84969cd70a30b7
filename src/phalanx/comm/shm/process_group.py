"""`PhalanxGroup`: the c10d process group of backend "phalanx".

The object holds the parts together: who is on which host, the mesh and arena of this one, the engine that runs calls,
the post office, and the group's fate. Its collective methods are in `operations`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from phalanx.comm.shm import accelerator, arena, census, collectives, monitor, p2p
from phalanx.comm.shm.arguments import ArgumentError, Landing, as_bytes, is_async, one, readable, seconds
from phalanx.comm.shm.between_hosts import BetweenHosts
from phalanx.comm.shm.engine import Engine
from phalanx.comm.shm.exchange import STAGING_BYTES
from phalanx.comm.shm.failure import Failure, Fate
from phalanx.comm.shm.hierarchical import HierarchicalCollectives
from phalanx.comm.shm.local import Collectives, LocalCollectives
from phalanx.comm.shm.mail import Mail
from phalanx.comm.shm.memory import anonymous
from phalanx.comm.shm.mesh import Mesh
from phalanx.comm.shm.operations import Operations
from phalanx.comm.shm.profiling import Span, open_span
from phalanx.comm.shm.rendezvous import meet
from phalanx.comm.shm.work import ShmWork

NAME = "phalanx"
_MIN_RENDEZVOUS_S = 10.0
_DRAIN_S = 10.0
_SMALL_NUMEL = 8
_KEPT_WORKS = 256


class PhalanxGroup(Operations, ProcessGroup):  # type: ignore[misc]
    """Collective to build: every rank of the group at once, over one store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, *, name: str) -> None:
        ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._store: Store | None = store
        self._group_name = name
        self._timeout_s = timeout.total_seconds()
        self._pid = os.getpid()
        self._closed = False
        self._coalescing: list[ShmWork] | None = None
        # C++ may be handed a work and keep it without its Python part, which alone knows the future (torch's DDP does so
        # with the one number that `join` adds up): the last few that hold next to no memory live on here.
        self._last_small: deque[ShmWork] = deque(maxlen=_KEPT_WORKS)
        self._fate = Fate(rank=rank, group=name)
        staging_fd = anonymous(STAGING_BYTES + p2p.MAIL_BYTES, "phalanx-staging")
        patience_s = max(self._timeout_s, _MIN_RENDEZVOUS_S)
        try:
            members = meet(store, rank, size, staging_fd=staging_fd, timeout_s=patience_s, group=name)
        except BaseException:
            os.close(staging_fd)
            raise
        self.hosts: list[list[int]] = members.hosts
        self._home = next(host for host in members.hosts if rank in host)
        index = {r: i for i, r in enumerate(self._home)}
        peers = {index[r]: peer for r, peer in members.peers.items()}
        self._arena = arena.Arena(staging_fd)
        for i, peer in peers.items():
            fd, peer.staging_fd = peer.staging_fd, -1
            self._arena.attach(arena.STAGING, i, fd)
        self._mesh = Mesh(index[rank], self._home, peers, self._arena, self._fate)
        self._mail = Mail(peers, self._fate)
        self._mail.whereabouts, self._mesh.ask_all = self._mesh.whereabouts, self._mail.ask_all
        self._post_office = p2p.PostOffice(self._mail, self._arena, self._fate, locals=self._home)
        self._fate.on_failure(lambda _: self._arena.isolate())
        self._engine = Engine(name)
        self._accelerator = accelerator.Accelerator(PrefixStore("accelerator/", store), rank, size, timeout)
        self._between = None if len(self.hosts) == 1 else BetweenHosts(store, rank, size, timeout, self._fate)
        self._ops: Collectives = (
            LocalCollectives(self._mesh)
            if self._between is None
            else HierarchicalCollectives(self._mesh, self.hosts, self._between)
        )
        self._monitor: monitor.MonitoredBarrier | None = monitor.MonitoredBarrier(
            PrefixStore("monitor/", store), rank, size
        )
        self._mail.open()
        census.enrol(self)

    # ---- identity --------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return NAME

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = getBackendName

    @property
    def group_name(self) -> Any:
        return self._group_name

    def _set_group_name(self, name: Any) -> None:
        self._group_name = self._fate.group = name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self._accelerator.devices()]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == "cpu" else self._accelerator.group()

    @property
    def uses_accelerator(self) -> bool:
        """Whether it has a communicator of another backend's, which only all ranks together may close."""
        return self._accelerator.in_use

    def get_group_store(self) -> Store:
        if self._store is None:
            raise RuntimeError(f"group {self._group_name} has been shut down on rank {self._rank}")
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._mesh.seq

    def _set_sequence_number_for_group(self) -> None:
        """Calls are numbered from the start."""

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<PhalanxGroup {self._group_name!r} rank {self._rank} of {self._size}, hosts {self.hosts}>"

    # ---- timeouts --------------------------------------------------------------------------------------------

    @property
    def timeout_s(self) -> float:
        """How long a call waits for its peers that does not bring its own time-out."""
        return self._timeout_s

    def set_timeout(self, timeout: timedelta) -> None:
        """For calls made from now on that do not bring their own."""
        if timeout.total_seconds() <= 0:
            raise ArgumentError(f"a timeout is a positive time, got {timeout}")
        self._timeout_s = timeout.total_seconds()
        self._accelerator.set_timeout(timeout)

    _set_default_timeout = set_timeout
    _set_timeout = set_timeout

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says who did not come, and leaves the group usable."""
        self._usable("monitored_barrier")
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()  # zero means: they are there or not
        assert self._monitor is not None
        self._monitor.wait(timeout_s, wait_all_ranks=wait_all_ranks)

    # ---- running calls ---------------------------------------------------------------------------------------

    def _run(self, name: str, act: Callable[[float], None], opts: Any, *, inputs: list[Tensor], result: Any) -> ShmWork:
        self._usable(name)
        timeout_s = seconds(opts.timeout, self._timeout_s) if opts is not None else self._timeout_s
        work = ShmWork(name, result)
        span = open_span(f"{NAME}:{name}", inputs)

        def guarded(inline: bool) -> None:
            mesh = self._mesh
            mesh.spinning = inline and mesh.may_spin
            mesh.inside = True
            try:
                act(timeout_s)
            except BaseException as error:
                if self._fate.failure is None:
                    cause = f"rank {self._rank} failed in {name}: {type(error).__name__}: {error}"
                    self._fate.fail(Failure("failed", self._rank, cause))
                raise
            finally:
                mesh.inside = False

        self._engine.run(work, guarded, inline=span is None and not is_async(opts), span=span)
        if self._coalescing is not None:
            self._coalescing.append(work)
        if len(inputs) == 1 and inputs[0].numel() <= _SMALL_NUMEL:
            self._last_small.append(work)
        return work

    def _usable(self, name: str) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{name}: process {os.getpid()} was forked from rank {self._rank} and has no part in its group; make a "
                f"new group in the child"
            )
        if self._closed:
            raise RuntimeError(f"{name}: group {self._group_name} has been shut down on rank {self._rank}")
        self._fate.check()

    def _elsewhere(self, method: str, tensor: Tensor, *args: Any) -> Any:
        self._usable(method)
        return getattr(self._accelerator.group(tensor.device), method)(*args)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalescing = []
        else:
            self._accelerator.group(device)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._accelerator.group(device)._end_coalescing()
        works, self._coalescing = self._coalescing or [], None
        return self._run("coalesced", lambda _: _wait_all(works), None, inputs=[], result=[]) if works else None

    # ---- point to point --------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        if tensors[0].is_cuda:
            return self._elsewhere("send", tensors[0], tensors, dst, tag)
        self._usable("send")
        if self._between is not None:
            return self._between.send(tensors[0], dst, tag)
        tensor = one(tensors, "send")
        work = ShmWork("send", [], source=self._rank)
        data = as_bytes(readable(tensor))
        finish = _ending(open_span(f"{NAME}:send", tensors), p2p.finisher(work))
        self._post_office.send(data, dst, tag, _describe(tensor), timeout_s=self._timeout_s, finish=finish)
        return work

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        return self._receive("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        return self._receive("recvAnySource", tensors, p2p.ANY, tag)

    def _receive(self, name: str, tensors: list[Tensor], src: int, tag: int) -> Any:
        if tensors[0].is_cuda:
            return self._elsewhere("recv", tensors[0], tensors, src, tag)
        self._usable(name)
        tensor = one(tensors, name)
        if self._between is not None:
            return self._between.recv(tensor, src, tag)
        place = Landing(tensor, filled=False)
        work = ShmWork(name, tensors, source=src)
        finish = _ending(open_span(f"{NAME}:{name}", tensors), p2p.finisher(work, place.land))
        data = as_bytes(place.flat)
        self._post_office.recv(data, src, tag, _describe(tensor), timeout_s=self._timeout_s, finish=finish)
        return work

    # ---- arena -----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat, zeroed or reused CPU tensor in the arena, which collectives of this group reduce in place.

        Collective: every rank calls it with the same arguments, in the same order as its other calls. The tensor may
        outlive the group. Give the memory back with `release`; what is not given back goes when the group and the
        tensor are gone.
        """
        self._usable("allocate")
        nbytes = numel * dtype.itemsize
        made: list[Tensor] = []

        def act(timeout_s: float) -> None:
            said = f"{numel} x {dtype}"
            number = collectives.allocate(self._mesh, nbytes, timeout_s=timeout_s, name=said)
            made.append(self._arena.tensor(number, numel, dtype))

        opts = torch.distributed.BarrierOptions()
        if hasattr(opts, "asyncOp"):
            opts.asyncOp = False
        self._run("allocate", act, opts, inputs=[], result=made).wait()
        return made[0]

    def release(self, tensor: Tensor) -> None:
        """Give memory from `allocate` back to the arena. Ordered like a collective; no view of it is used any more."""
        if self._closed or self._fate.failure is not None:
            return

        def act(_: float) -> None:
            self._arena.release(tensor)

        if self._arena.locate(tensor) is None:
            raise ArgumentError("release: expected a tensor from this group's allocate(), got another")
        self._run("release", act, None, inputs=[], result=[]).wait()

    # ---- the end ---------------------------------------------------------------------------------------------

    def abort(self, reason: str = "abort() was called") -> None:
        """Wake every waiter of this group, on every rank, with an error that carries the reason."""
        self._fate.fail(Failure("aborted", self._rank, f"rank {self._rank} aborted the group: {reason}"))
        self._close()
        self._accelerator.abort()

    def shutdown(self) -> None:
        """Let queued calls finish, say goodbye, and let go of everything but what tensors still hold."""
        if self._closed or os.getpid() != self._pid:
            return
        if not self._engine.drain(_DRAIN_S if self._fate.failure is None else 1.0):
            self._fate.fail(Failure("aborted", self._rank, f"rank {self._rank} shut the group down during a call"))
        self._mail.say_goodbye("it shut the group down")
        self._close()
        self._accelerator.shutdown()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._last_small.clear()
        census.strike_off(self)
        self._engine.drain(5.0)
        self._engine.join(5.0)
        self._mesh.close()
        self._mail.close()
        self._arena.close()
        if self._between is not None:
            self._between.close()
        self._store = self._monitor = None  # whoever keeps this object must not keep the store's connection
        self._accelerator.forget_store()

    def _last_words(self, cause: str | None) -> None:
        if self._closed:
            return
        if cause is None:
            self._mail.say_goodbye("its process ended")
        else:
            self._fate.fail(Failure("failed", self._rank, f"rank {self._rank} failed: {cause}"))

    def _forked(self) -> None:
        """In a forked child: nothing of the parent's may stay open here, and no thread of ours is alive here."""
        self._closed = True
        self._mesh.abandon()
        self._arena.part_from_parent()


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]"


def _wait_all(works: list[ShmWork]) -> None:
    for work in works:
        work.wait()


def _ending(span: Span | None, finish: p2p.Finish) -> p2p.Finish:
    if span is None:
        return finish

    def both(error: BaseException | None, source: int) -> None:
        span.end()
        finish(error, source)

    return both
