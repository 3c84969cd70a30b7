"""What the test process, the warm server and the ranks say to each other, and how it is framed.

Three kinds of process share these records: the *client* (pytest, or a script) sends a `RunRequest` to the *server*, the
server forks the *ranks*, each rank sends `BODY_DONE` and then a `RankReport`, and the server answers a `RunResult`.
Every message is a pickle with its length in front, over unnamed Unix sockets that only these processes hold.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_LENGTH = struct.Struct("!Q")

BODY_DONE = "body done"
"""Rank to server: my body has returned; I hold my process group until everybody has got this far."""

TEAR_DOWN = "tear down"
"""Server to rank: every rank has returned, failed or gone; destroy the group, look for leaks, report."""


class Verdict(Enum):
    """How a rank's body ended, as the rank itself tells it."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class RunRequest:
    """Run one body in `world_size` ranks. `payload` is opaque to the server: only the ranks unpickle it."""

    world_size: int
    backend: str | None
    timeout_s: float
    grace_s: float
    check_leaks: bool
    expect_exit: dict[int, int]
    payload: bytes
    env: dict[str, str]
    sys_path: list[str]
    cwd: str
    preload: tuple[str, ...]


@dataclass(frozen=True)
class RankReport:
    """A rank's last words: its verdict, the traceback or the reason to skip, its value, and what it left behind."""

    verdict: Verdict
    text: str = ""
    value: bytes = b""
    leaks: tuple[str, ...] = ()


@dataclass
class RankOutcome:
    """What became of one rank: its report if it made one, how its process ended, and what it printed.

    `order` counts reports and exits in the order in which the server saw them, so that the first failure, which is
    usually the cause of the others, can be shown first. `killed` says why the server ended the rank, if it did.
    """

    rank: int
    report: RankReport | None = None
    exit_code: int | None = None
    order: int = 0
    killed: str = ""
    output: str = ""
    stacks: str = ""


@dataclass
class RunResult:
    """The server's answer. `refused` is set, and `outcomes` empty, when the server could not fork safely."""

    outcomes: list[RankOutcome] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    timed_out: bool = False
    refused: str = ""


def send(sock: socket.socket, message: object) -> None:
    """Send one message whole. Raises `OSError` when the other side is gone."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Block for one message. Raises `EOFError` when the other side closed before a whole one came."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return pickle.loads(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < num_bytes:
        chunk = sock.recv(min(1 << 20, num_bytes - len(chunks)))
        if not chunk:
            raise EOFError("the other side closed the connection")
        chunks += chunk
    return bytes(chunks)


class Inbox:
    """Messages out of a non-blocking socket, for the server, which must never wait for a single rank."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._data = bytearray()
        self.closed = False

    def drain(self) -> list[Any]:
        """Everything that has arrived whole. Sets `closed` once the rank's end is gone."""
        while not self.closed:
            try:
                chunk = self._sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.closed = True
            self._data += chunk
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if len(self._data) < _LENGTH.size + length:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH.size : _LENGTH.size + length])))
            del self._data[: _LENGTH.size + length]
        return messages
