"""The collective channel of one host: an ordered socket to each local peer, and calls numbered alike on all.

Calls of a group run one after the other, so at any time one thread reads these sockets. A packet that is not the one
expected means that ranks called different things; both calls are then shown, on every rank.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.comm.shm import wire
from phalanx.comm.shm.arena import Arena
from phalanx.comm.shm.blame import Whereabouts, blame
from phalanx.comm.shm.failure import Failure, Fate
from phalanx.comm.shm.peer import Peer

EAGER_BYTES = 32 * 1024  # up to this, the bytes travel inside the packet
_PACKET = wire.HEAD.size + wire.MAX_SIGNATURE + 1024  # enough of any packet to tell what it is
_MAX_WAIT_S = 10.0**8
_SPIN_S = 100e-6  # waking a sleeping thread costs about as much as this
_ONCE = socket.MSG_DONTWAIT
_ASK_S = 0.3  # how long a healthy process may take to say where it is


class Mesh:
    """The local ranks of a group. `ranks[i]` is the group's rank of local index `i`; we are local index `index`."""

    def __init__(self, index: int, ranks: Sequence[int], peers: dict[int, Peer], arena: Arena, fate: Fate) -> None:
        self.index = index
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self.others = [i for i in range(self.size) if i != index]
        self.arena = arena
        self.fate = fate
        self.seq = 0
        # Asking again beats sleeping, but only with a core for each rank, and not on a thread beside one that computes.
        self.may_spin = len(os.sched_getaffinity(0)) >= self.size
        self.spinning = False
        self.inside = False  # a call runs
        self._last = b""
        self._waits_for = -1
        self.ask_all: Callable[[float], Mapping[int, Whereabouts]] = lambda timeout_s: {}
        self._peers = peers
        self._socks = {i: peer.calls for i, peer in peers.items()}
        self._wait_s: float | None = None
        self._head = bytearray(wire.HEAD.size + wire.MAX_SIGNATURE + wire.PARCEL.size)
        self._head_view = memoryview(self._head)
        self._inbox: dict[int, tuple[memoryview, Tensor]] = {}
        self._inbox_views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    # ---- a call ----------------------------------------------------------------------------------------------

    def begin(self, signature: bytes, timeout_s: float) -> Call:
        """The next call of this group. Every rank begins the same calls in the same order."""
        self.fate.check()
        self.seq += 1
        if self._wait_s != timeout_s:
            self._set_wait(timeout_s)
            self._wait_s = timeout_s
        self._last = signature
        self._waits_for = -1
        return Call(self, self.seq, signature, timeout_s)

    def whereabouts(self) -> Whereabouts:
        """For a peer that asks, from any thread."""
        call = f"{self._last.decode()} #{self.seq}" if self.seq else ""
        waits_for = self.ranks[self._waits_for] if self._waits_for >= 0 else -1
        return Whereabouts(self.seq, call, self.inside, waits_for)

    def _set_wait(self, seconds: float, only: int | None = None) -> None:
        seconds = min(max(seconds, 1e-6), _MAX_WAIT_S)
        raw = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for i, sock in self._socks.items():
            if only is None or i == only:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, raw)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, raw)

    def inbox(self, index: int) -> tuple[memoryview, Tensor]:
        """Where the bytes inside packets of a peer land: as a buffer and as a tensor, valid until its next packet."""
        found = self._inbox.get(index)
        if found is None:
            raw = bytearray(EAGER_BYTES + 64)
            tensor = torch.frombuffer(raw, dtype=torch.uint8)
            skip = -tensor.data_ptr() % 64
            found = memoryview(raw)[skip : skip + EAGER_BYTES], tensor[skip : skip + EAGER_BYTES]
            self._inbox[index] = found
        return found

    def inbox_as(self, index: int, nbytes: int, dtype: torch.dtype) -> Tensor:
        """The first bytes of an inbox as a flat tensor. Views are kept: making one costs as much as a small sum."""
        key = (index, nbytes, dtype)
        found = self._inbox_views.get(key)
        if found is None:
            if len(self._inbox_views) >= 1024:
                self._inbox_views.clear()
            found = self._inbox_views[key] = self.inbox(index)[1][:nbytes].view(dtype)
        return found

    def abandon(self) -> None:
        """In a forked child: close the parent's descriptors without a word to the peers."""
        for peer in self._peers.values():
            peer.close()

    def close(self) -> None:
        for peer in self._peers.values():
            peer.hang_up()
            peer.calls.close()
        self._inbox.clear()
        self._inbox_views.clear()


class Call:
    """One collective call: sends and receives its packets, and turns silence and nonsense into errors."""

    __slots__ = ("_began", "_deadline", "_entry", "mesh", "seq", "signature", "timeout_s")

    def __init__(self, mesh: Mesh, seq: int, signature: bytes, timeout_s: float) -> None:
        self.mesh = mesh
        self.seq = seq
        self.signature = signature
        self.timeout_s = timeout_s
        self._entry = wire.head(wire.ENTRY, seq, signature=signature)
        self._began = time.monotonic()
        self._deadline = False

    def __str__(self) -> str:
        return f"{self.signature.decode()} #{self.seq}"

    # ---- sending: a peer that is gone is found when its answer is missed, after what it did send has been used

    def send_entry(self, index: int, parcel: bytes, body: object = b"") -> None:
        try:
            self.mesh._socks[index].sendmsg((self._entry, parcel, body))  # type: ignore[arg-type]
        except BlockingIOError:
            raise self._timed_out(index) from None
        except OSError:
            pass

    def send(self, index: int, phase: int, round: int = 0, fds: Sequence[int] = ()) -> None:
        packet = wire.head(phase, self.seq, round=round)
        try:
            if fds:
                socket.send_fds(self.mesh._socks[index], [packet], list(fds))
            else:
                self.mesh._socks[index].send(packet)
        except BlockingIOError:
            raise self._timed_out(index) from None
        except OSError:
            pass

    # ---- receiving -------------------------------------------------------------------------------------------

    def recv_entry(self, index: int) -> wire.Parcel:
        """A peer's entry into this call. The bytes inside its packet, if any, are in the mesh's inbox."""
        mesh = self.mesh
        length = len(self._entry)
        body = mesh.inbox(index)[0]
        view = mesh._head_view[: length + wire.PARCEL.size]
        sock = mesh._socks[index]
        flags, spin_until = (_ONCE, time.monotonic() + _SPIN_S) if mesh.spinning else (0, 0.0)
        while True:
            if not flags:
                self._mind_deadline(index)
            try:
                count = sock.recvmsg_into((view, body), 0, flags)[0]
                break
            except BlockingIOError:
                if not flags:
                    self._deadline = True
                elif time.monotonic() > spin_until:
                    flags = 0
                else:
                    os.sched_yield()  # the peer may be waiting for this very core
            except ConnectionResetError:
                continue  # said once, ahead of what the peer sent before it closed
            except OSError:
                count = 0
                break
        if count < length or not mesh._head.startswith(self._entry):
            raw = bytes(view) + bytes(body[:512])
            raise self._unexpected(index, raw[:count])
        return wire.Parcel.unpack(view[length:])

    def recv(self, index: int, phase: int, round: int = 0, fds: list[int] | None = None) -> None:
        expected = wire.head(phase, self.seq, round=round)
        sock = self.mesh._socks[index]
        flags, spin_until = (_ONCE, time.monotonic() + _SPIN_S) if self.mesh.spinning else (0, 0.0)
        while True:
            if not flags:
                self._mind_deadline(index)
            try:
                if fds is None:
                    raw = sock.recv(_PACKET, flags)
                else:
                    raw, received, _, _ = socket.recv_fds(sock, _PACKET, 1)
                    fds.extend(received)
                break
            except BlockingIOError:
                if not flags:
                    self._deadline = True
                elif time.monotonic() > spin_until:
                    flags = 0
                else:
                    os.sched_yield()  # the peer may be waiting for this very core
            except ConnectionResetError:
                continue
            except OSError:
                raw = b""
                break
        if raw != expected:
            raise self._unexpected(index, raw)

    def _mind_deadline(self, index: int) -> None:
        """Waits begin with the whole time allowed; once a good part of it has passed, with what is left."""
        self.mesh._waits_for = index
        spent = time.monotonic() - self._began
        if not self._deadline and spent < 0.05 * self.timeout_s:
            return
        self._deadline = True
        left = self.timeout_s - spent
        if left <= 0:
            raise self._timed_out(index)
        self.mesh._set_wait(left, only=index)
        self.mesh._wait_s = None  # to be set anew by the next call

    # ---- what goes wrong -------------------------------------------------------------------------------------

    def fail(self, failure: Failure) -> Exception:
        mesh = self.mesh
        return mesh.fate.fail(failure).error(rank=mesh.fate.rank, group=mesh.fate.group)

    def _timed_out(self, index: int) -> Exception:
        mesh = self.mesh
        answers = mesh.ask_all(_ASK_S)
        known = mesh.fate.failure  # a death or an abort that came to light meanwhile says more than a timeout
        if known is not None:
            return self.fail(known)
        rank, doing = blame(mesh.ranks[index], self.seq, mesh.fate.rank, answers)
        waited = f"{self.timeout_s * 1000:.0f}ms"
        text = f"Timed out waiting {waited} for rank {rank} in {self} after its timeout passed: {doing}"
        return self.fail(Failure("timeout", rank, text))

    def mismatch(self, index: int, theirs: str, ours: str | None = None) -> Exception:
        """Both calls, in the order of ranks, so that every rank shows the same text."""
        fate = self.mesh.fate
        pair = sorted([(fate.rank, ours or str(self)), (self.mesh.ranks[index], theirs)])
        said = "; ".join(f"rank {rank} called {call}" for rank, call in pair)
        return self.fail(Failure("mismatch", self.mesh.ranks[index], f"ranks called different collectives: {said}"))

    def _unexpected(self, index: int, raw: bytes) -> Exception:
        rank = self.mesh.ranks[index]
        if not raw:
            return self.fail(self.mesh.fate.explain(rank, str(self)))
        said = wire.describe(raw)
        if said is None:
            return self.fail(Failure("failed", rank, f"rank {rank} sent {raw[:16]!r} during {self}, which is no call"))
        seq, phase, signature = said
        what = f"{signature} #{seq}" if phase == wire.ENTRY else f"step {phase} of its call #{seq}"
        return self.mismatch(index, what)
