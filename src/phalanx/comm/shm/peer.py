"""A peer on this host: its sockets, its process, and how that process ended."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
from dataclasses import dataclass

_SO_PEERPIDFD = 77
_PIDFD_INFO = struct.Struct("=QQ11Ii")
_PIDFD_GET_INFO = 0xC0000000 | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_CREDENTIALS = struct.Struct("3i")


@dataclass
class Peer:
    """Two sockets and a process descriptor. `calls` is for collectives, `mail` for point-to-point and control."""

    rank: int
    calls: socket.socket
    mail: socket.socket
    staging_fd: int
    pid: int
    pidfd: int | None

    def close(self) -> None:
        self.calls.close()
        self.mail.close()
        if self.staging_fd >= 0:
            os.close(self.staging_fd)
            self.staging_fd = -1
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def hang_up(self) -> None:
        """Wakes whoever waits on the collective channel, on both sides; what was already sent can still be read."""
        try:
            self.calls.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end; the pid is 0 where it is not visible from here."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def open_pidfd(sock: socket.socket) -> int | None:
    """A descriptor that becomes readable when the process at the other end dies. None where the kernel has none."""
    try:
        (fd,) = struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))
        os.set_inheritable(fd, False)
        return int(fd)
    except OSError:  # before Linux 6.5
        pass
    try:
        return os.pidfd_open(credentials(sock)[0])
    except OSError:
        return None


def how_it_ended(pid: int, pidfd: int | None) -> str:
    """In words, where it can be known: of a zombie from /proc, of a reaped process from its descriptor."""
    status = _status(pid, pidfd)
    if status is None:
        return "its exit status is not known"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit status {os.WEXITSTATUS(status)}"


def _status(pid: int, pidfd: int | None) -> int | None:
    reaped = select.poll()
    if pidfd is not None:
        reaped.register(pidfd, 0)  # it hangs up when the parent has collected the status
    for wait_ms in (0, 0, 20, 50):  # a process may be collected between the two looks
        status = _reaped_status(pidfd) if pidfd is not None else None
        if status is None:
            status = _zombie_status(pid)
        if status is not None:
            return status
        reaped.poll(wait_ms)
    return None


def _reaped_status(pidfd: int) -> int | None:
    raw = bytearray(_PIDFD_INFO.size)
    struct.pack_into("=Q", raw, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, raw)
    except OSError:
        return None
    fields = _PIDFD_INFO.unpack(raw)
    return int(fields[-1]) if fields[0] & _PIDFD_INFO_EXIT else None


def _zombie_status(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] in (b"Z", b"X") else None
