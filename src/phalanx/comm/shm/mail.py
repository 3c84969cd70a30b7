"""The mail channel: control messages and the packets of point-to-point calls, all handled on the watching thread.

`Mail` owns the mail sockets and process descriptors of one group. It learns that a peer said goodbye, failed, or died,
and tells the group's `Fate`; every other packet it hands to the post office. A forked child of a dead rank may keep its
sockets open, so death is told by the process descriptor, never by end-of-file alone.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.comm.shm import event_loop
from phalanx.comm.shm.blame import Whereabouts
from phalanx.comm.shm.failure import Failure, Fate
from phalanx.comm.shm.peer import Peer, how_it_ended

GOODBYE, FAILURE, ASK, ANSWER, LETTER, OFFER, ACCEPT, DATA, TAKEN, REFUSE = range(10)
MAIL = struct.Struct("<BxHIqQQ")  # kind, length of the text, slot, tag, number of the send, length in bytes
MAX_LETTER = 32 * 1024
_PACKET = MAX_LETTER + 8192


@dataclass(frozen=True)
class Packet:
    kind: int
    text: str = ""
    slot: int = 0
    tag: int = 0
    number: int = 0
    length: int = 0
    body: bytes = b""

    def pack(self) -> bytes:
        text = self.text.encode()[:4096]
        return MAIL.pack(self.kind, len(text), self.slot, self.tag, self.number, self.length) + text + self.body

    @classmethod
    def unpack(cls, raw: bytes) -> Packet:
        kind, size, slot, tag, number, length = MAIL.unpack_from(raw)
        end = MAIL.size + size
        return cls(kind, raw[MAIL.size : end].decode(errors="replace"), slot, tag, number, length, raw[end:])


class Mail:
    def __init__(self, peers: dict[int, Peer], fate: Fate) -> None:
        self._peers = {peer.rank: peer for peer in peers.values()}
        self._fate = fate
        self._backlog: dict[int, deque[bytes]] = {rank: deque() for rank in self._peers}
        self._answers: dict[int, Whereabouts] = {}
        self._answered = threading.Condition()
        self.whereabouts: Callable[[], Whereabouts] = lambda: Whereabouts(0, "", False, -1)
        self._closed = False
        self.loop = event_loop.retain()
        self.deliver: Callable[[int, Packet], None] = lambda rank, packet: None
        self.on_leave: Callable[[int], None] = lambda rank: None
        fate.on_failure(self._tell)

    def open(self) -> None:
        loop = self.loop

        def register() -> None:
            for peer in self._peers.values():
                loop.add(peer.mail.fileno(), select.EPOLLIN, self._on_mail(peer))
                if peer.pidfd is not None:
                    loop.add(peer.pidfd, select.EPOLLIN, self._on_death(peer))

        loop.call(register)

    # ---- sending ---------------------------------------------------------------------------------------------

    def post(self, rank: int, packet: Packet) -> None:
        """On the watching thread only. Packets that do not fit the socket wait their turn."""
        backlog = self._backlog[rank]
        backlog.append(packet.pack())
        self._flush(rank)

    def _flush(self, rank: int) -> None:
        peer, backlog = self._peers[rank], self._backlog[rank]
        waited = False
        while backlog and not self._closed:
            try:
                peer.mail.send(backlog[0])
            except BlockingIOError:
                waited = True
                break
            except OSError:  # it is gone; what that means is told by its process descriptor or its goodbye
                backlog.clear()
                break
            backlog.popleft()
        if not self._closed and peer.mail.fileno() >= 0:
            try:
                self.loop.modify(peer.mail.fileno(), select.EPOLLIN | (select.EPOLLOUT if waited else 0))
            except OSError:
                pass  # no longer watched: the peer has left

    def _tell(self, failure: Failure) -> None:
        """Whoever finds the failure tells all; each names the same rank."""
        raw = Packet(FAILURE, body=failure.encode()).pack()
        for peer in self._peers.values():
            self._send_now(peer, raw)
            peer.hang_up()

    def say_goodbye(self, text: str) -> None:
        raw = Packet(GOODBYE, text).pack()
        for peer in self._peers.values():
            self._send_now(peer, raw)

    def ask_all(self, timeout_s: float) -> dict[int, Whereabouts]:
        """Where every local peer is. Those that do not answer in time are not in the result."""
        deadline = time.monotonic() + timeout_s
        with self._answered:
            self._answers = {}
            for peer in self._peers.values():
                self._send_now(peer, Packet(ASK).pack())
            self._answered.wait_for(
                lambda: len(self._answers) == len(self._peers), timeout=max(deadline - time.monotonic(), 0)
            )
            return dict(self._answers)

    def _send_now(self, peer: Peer, raw: bytes) -> None:
        try:
            peer.mail.send(raw, socket.MSG_DONTWAIT)
        except OSError:
            pass  # its queue is full or it is gone; it will notice by our process descriptor or closed socket

    # ---- receiving -------------------------------------------------------------------------------------------

    def _on_mail(self, peer: Peer) -> Callable[[int], None]:
        def handle(events: int) -> None:
            if events & select.EPOLLOUT:
                self._flush(peer.rank)
            if events & ~select.EPOLLOUT:
                self._drain(peer)

        return handle

    def _drain(self, peer: Peer) -> None:
        while not self._closed:
            try:
                raw = peer.mail.recv(_PACKET)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue
            except OSError:
                raw = b""
            if not raw:
                self.loop.remove(peer.mail.fileno())
                if peer.pidfd is None and peer.rank not in self._fate.goodbyes:
                    self._fate.fail(
                        Failure("lost", peer.rank, f"rank {peer.rank} closed its connection without a word")
                    )
                self.on_leave(peer.rank)
                return
            packet = Packet.unpack(raw)
            if packet.kind == GOODBYE:
                self._fate.goodbye(peer.rank, packet.text)
            elif packet.kind == FAILURE:
                self._fate.fail(Failure.decode(packet.body))
            elif packet.kind == ASK:
                self._send_now(peer, Packet(ANSWER, body=self.whereabouts().encode()).pack())
            elif packet.kind == ANSWER:
                with self._answered:
                    self._answers[peer.rank] = Whereabouts.decode(packet.body)
                    self._answered.notify_all()
            else:
                self.deliver(peer.rank, packet)

    def _on_death(self, peer: Peer) -> Callable[[int], None]:
        def handle(_: int) -> None:
            if peer.pidfd is not None:
                self.loop.remove(peer.pidfd)
            self._drain(peer)  # its last words come first
            if peer.rank in self._fate.goodbyes:
                return
            how = how_it_ended(peer.pid, peer.pidfd)
            self._fate.fail(
                Failure("lost", peer.rank, f"rank {peer.rank} (process {peer.pid}) died: {how}. See its own output")
            )

        return handle

    def close(self) -> None:
        """Stop watching and close the mail sockets and process descriptors."""
        loop = self.loop

        def unregister() -> None:
            self._closed = True
            for peer in self._peers.values():
                if peer.mail.fileno() >= 0:
                    loop.remove(peer.mail.fileno())
                if peer.pidfd is not None:
                    loop.remove(peer.pidfd)
                peer.close()

        loop.call(unregister)
        event_loop.dismiss()
