"""How the ranks of a group find out who shares a host, and get hold of each other.

Every rank publishes a card in the store: boot id, network namespace, user, and the name of an abstract Unix socket.
Ranks whose cards agree then try to connect; what counts is whether they really can. Over the connection they prove
that they know the job's secret, which only the store holds, and pass descriptors: a socket for mail and the memory of
their staging segment. A stranger that connects is refused and logged, and the rendezvous goes on.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from phalanx.comm.shm.peer import Peer, credentials, open_pidfd
from phalanx.errors import CollectiveTimeoutError

log = logging.getLogger("phalanx.comm.shm")

PROTOCOL = 1
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Card:
    """What a rank says of itself. Ranks with the same `place` may share a host."""

    rank: int
    boot: str
    network: str
    uid: int
    protocol: int
    address: str

    @property
    def place(self) -> tuple[str, str, int, int]:
        return self.boot, self.network, self.uid, self.protocol


@dataclass
class Membership:
    """`hosts` lists the ranks of each host, in the order of their first ranks; `peers` are those on ours."""

    hosts: list[list[int]]
    peers: dict[int, Peer] = field(default_factory=dict)


def partition(reach: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Hosts from who reached whom. Every rank computes the same: in rank order, a rank joins the first host all of
    whose members it reached and was reached by, else it begins a new one."""
    hosts: list[list[int]] = []
    for rank in sorted(reach):
        for host in hosts:
            if all(rank in reach[other] and other in reach[rank] for other in host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return hosts


def own_card(rank: int, address: str) -> Card:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return Card(rank, boot, os.readlink("/proc/self/ns/net"), os.getuid(), PROTOCOL, address)


def meet(store: Store, rank: int, size: int, *, staging_fd: int, timeout_s: float, group: str) -> Membership:
    """Collective over all ranks of the group."""
    if size == 1:
        return Membership([[0]])
    return _Rendezvous(store, rank, size, staging_fd, timeout_s, group).meet()


class _Rendezvous:
    def __init__(self, store: Store, rank: int, size: int, staging_fd: int, timeout_s: float, group: str) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._staging_fd = staging_fd
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._group = group
        self._secret = ""
        self._peers: dict[int, Peer] = {}

    def meet(self) -> Membership:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            address = f"phalanx-{secrets.token_hex(12)}"
            listener.bind("\0" + address)
            listener.listen(self._size + 16)
            if self._rank == 0:
                self._store.set("secret", secrets.token_hex(32))
            self._store.set(f"card/{self._rank}", json.dumps(asdict(own_card(self._rank, address))))
            self._secret = self._get("secret", 0).decode()
            cards = [Card(**json.loads(self._get(f"card/{r}", r))) for r in range(self._size)]
            near = [card for card in cards if card.place == cards[self._rank].place and card.rank != self._rank]
            self._connect([card for card in near if card.rank < self._rank])
            self._accept(listener, {card.rank for card in near if card.rank > self._rank})
            self._await_welcomes()
            return self._agree()
        except BaseException:
            for peer in self._peers.values():
                peer.close()
            raise
        finally:
            listener.close()

    # ---- the store -------------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def _get(self, key: str, owner: int) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=self._left_s()))
        except (DistStoreError, RuntimeError) as error:
            raise CollectiveTimeoutError(
                f"rank {owner} did not come to the rendezvous of group {self._group} within {self._timeout_s:g} s: "
                f"its {key!r} is not in the store. Is it running, and has it called the same new_group?",
                rank=self._rank,
                group=self._group,
            ) from error
        return bytes(self._store.get(key))

    # ---- connecting ------------------------------------------------------------------------------------------

    def _connect(self, cards: Sequence[Card]) -> None:
        failed = []
        for card in cards:
            calls = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            calls.settimeout(self._left_s())
            mail, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                calls.connect("\0" + card.address)
                hello = {"secret": self._secret, "rank": self._rank, "group": self._group}
                socket.send_fds(calls, [json.dumps(hello).encode()], [theirs.fileno(), self._staging_fd])
            except OSError as error:
                log.info("rank %d cannot reach rank %d's socket (%s)", self._rank, card.rank, error)
                failed.append(card.rank)
                calls.close()
                mail.close()
            else:
                pid, _ = credentials(calls)
                self._peers[card.rank] = Peer(card.rank, calls, mail, -1, pid, open_pidfd(calls))
            finally:
                theirs.close()
        self._store.set(f"tried/{self._rank}", json.dumps(failed))

    def _accept(self, listener: socket.socket, awaited: set[int]) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        pending: dict[int, socket.socket] = {}
        try:
            while awaited:
                for fd, _ in poll.poll(min(100, 1000 * self._left_s())):
                    if fd == listener.fileno():
                        conn, _ = listener.accept()
                        pending[conn.fileno()] = conn
                        poll.register(conn, select.POLLIN)
                    else:
                        poll.unregister(fd)
                        conn = pending.pop(fd)
                        admitted = self._admit(conn, awaited)
                        awaited.discard(admitted)
                awaited -= {r for r in awaited if self._gave_up(r)}
                if awaited and time.monotonic() > self._deadline:
                    raise CollectiveTimeoutError(
                        f"ranks {sorted(awaited)} are on this host but did not connect within {self._timeout_s:g} s",
                        rank=self._rank,
                        group=self._group,
                    )
        finally:
            for conn in pending.values():
                log.warning("rank %d: a connection that never said who it is was dropped", self._rank)
                conn.close()

    def _gave_up(self, rank: int) -> bool:
        return self._store.check([f"tried/{rank}"]) and self._rank in json.loads(self._store.get(f"tried/{rank}"))

    def _admit(self, conn: socket.socket, awaited: set[int]) -> int:
        """The rank of a connection that is one of ours, else -1; the connection is then closed."""
        fds: list[int] = []
        pid, uid = credentials(conn)
        try:
            raw, fds, _, _ = socket.recv_fds(conn, 4096, 2)
            said = json.loads(raw) if raw else {}
            rank, secret = int(said.get("rank", -1)), str(said.get("secret", ""))
            if uid != os.getuid():
                raise PermissionError(f"user {uid} is not {os.getuid()}, the user of this job")
            if not hmac.compare_digest(secret.encode(), self._secret.encode()):
                raise PermissionError("it does not know the secret of this job")
            if rank not in awaited or len(fds) != 2:
                raise PermissionError(f"it says it is rank {rank}, which is not awaited")
            conn.setblocking(True)
            welcome = json.dumps({"secret": self._secret, "rank": self._rank}).encode()
            socket.send_fds(conn, [welcome], [self._staging_fd])
        except (OSError, ValueError, AttributeError) as error:
            log.warning("rank %d refused a connection from process %d: %s", self._rank, pid, error)
            for fd in fds:
                os.close(fd)
            conn.close()
            return -1
        self._peers[rank] = Peer(rank, conn, socket.socket(fileno=fds[0]), fds[1], pid, open_pidfd(conn))
        return rank

    def _await_welcomes(self) -> None:
        for rank in sorted(r for r in self._peers if r < self._rank):
            peer = self._peers[rank]
            fds: list[int] = []
            try:
                peer.calls.settimeout(self._left_s())
                raw, fds, _, _ = socket.recv_fds(peer.calls, 4096, 1)
                said = json.loads(raw) if raw else {}
                if said.get("rank") != rank or not hmac.compare_digest(str(said.get("secret")), self._secret):
                    raise PermissionError("what answered is not of this job")
                if len(fds) != 1:
                    raise PermissionError(f"{len(fds)} descriptors came with its welcome instead of one")
                peer.staging_fd = fds[0]
            except (OSError, ValueError) as error:
                log.warning("rank %d: no welcome from rank %d (%s)", self._rank, rank, error)
                for fd in fds:
                    os.close(fd)
                peer.close()
                del self._peers[rank]

    # ---- agreeing --------------------------------------------------------------------------------------------

    def _agree(self) -> Membership:
        self._store.set(f"reach/{self._rank}", json.dumps(sorted(self._peers)))
        reach = {r: json.loads(self._get(f"reach/{r}", r)) for r in range(self._size)}
        hosts = partition(reach)
        home = next(host for host in hosts if self._rank in host)
        for rank in [r for r in self._peers if r not in home]:
            self._peers.pop(rank).close()
        for peer in self._peers.values():
            peer.calls.settimeout(None)
            peer.mail.setblocking(False)
            for sock in (peer.calls, peer.mail):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return Membership(hosts, self._peers)
