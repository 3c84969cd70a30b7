"""What a test leaves behind: processes, threads, descriptors, socket files, shared memory.

A rank takes a `Snapshot` before its process group is made and asks `left_behind` after it is destroyed; the server does
the same for what only shows once the ranks are gone (shared memory, orphans). Everything reads /proc and is skipped
where there is none. torch leaves nothing: on 2.13 the descriptors after `destroy_process_group` are those before
`init`.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHM = Path("/dev/shm")
_SETTLE_S = 1.0
_MIN_LOOKS = 5


@dataclass(frozen=True)
class Snapshot:
    """Threads, children and open descriptors of this process at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    descriptors: dict[int, str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(frozenset(_python_threads()), frozenset(children_of(os.getpid())), _descriptors())


def left_behind(before: Snapshot) -> list[str]:
    """What there is now and was not in `before`, one line each.

    Threads that were told to stop and sockets whose owner is being torn down by a native thread need a moment, and
    nothing announces their end: look again until there is nothing, for one second at most. On a busy machine one
    collection may take that long; what a collection frees may be what only the next finds unreachable.
    """
    _stop_singletons()
    deadline = time.monotonic() + _SETTLE_S
    found = _compare(before)
    num_looks = 0
    while found and (time.monotonic() < deadline or num_looks < _MIN_LOOKS):
        num_looks += 1
        gc.collect()
        for thread in _python_threads():
            if thread not in before.threads and thread is not threading.current_thread():
                thread.join(0.05)
        time.sleep(0.01)
        found = _compare(before)
    return found


def _compare(before: Snapshot) -> list[str]:
    found = [
        f"process {pid} ({command_of(pid)}) is still running"
        for pid in children_of(os.getpid())
        if pid not in before.children
    ]
    found += [
        f"thread {thread.name!r} ({'daemon' if thread.daemon else 'not daemon'}) is still running"
        for thread in _python_threads()
        if thread not in before.threads
    ]
    new = {fd: target for fd, target in _descriptors().items() if before.descriptors.get(fd) != target}
    # The first TCPStore that a process hosts makes libuv open one pipe to itself, for good (uv__signal_global_init).
    own_pipes = [t for t in new.values() if t.startswith("pipe:") and list(new.values()).count(t) == 2]
    for fd, target in new.items():
        if target not in own_pipes[:1]:
            kind = "socket" if target.startswith("socket:") else "descriptor"
            found.append(f"{kind} {fd} is still open: {_describe(target)}")
    return found


def _python_threads() -> list[threading.Thread]:
    # A _DummyThread stands for a native thread (autograd's, Gloo's) that once ran a Python callback: not the body's.
    return [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]


def _stop_singletons() -> None:
    """End what the standard library starts once per process and never stops: not the body's to stop either."""
    sharer: Any = sys.modules.get("multiprocessing.resource_sharer")
    if sharer is not None:
        sharer.stop(_SETTLE_S)
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None and hasattr(tracker._resource_tracker, "_stop"):
        tracker._resource_tracker._stop()


def children_of(pid: int, *, with_zombies: bool = False) -> list[int]:
    """Children of a process, over all its threads. Empty where there is no /proc."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:
            continue  # the thread ended while we looked
    return [child for child in found if with_zombies or _state_of(child) not in ("Z", "X", "")]


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def command_of(pid: int) -> str:
    """The command line of a process, shortened, or its name."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return words[:80] or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def _descriptors() -> dict[int, str]:
    found = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for name in names:
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    # CUDA's driver keeps its device files, event descriptors and their sockets until the process ends.
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found = {
            fd: t for fd, t in found.items() if not t.startswith(("/dev/nvidia", "anon_inode:", "pipe:", "socket:"))
        }
    return found


def _describe(target: str) -> str:
    """A socket's inode says nothing to a reader: look up its Unix name or its TCP ports."""
    if not target.startswith("socket:["):
        return target
    inode = target[len("socket:[") : -1]
    for line in _lines("/proc/self/net/unix"):
        fields = line.split()
        if len(fields) >= 7 and fields[6] == inode:
            return f"Unix socket {fields[7]}" if len(fields) > 7 else "Unix socket, unnamed"
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in _lines(f"/proc/self/net/{table}"):
            fields = line.split()
            if len(fields) > 9 and fields[9] == inode:
                local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                return f"{table} port {local}" + (f" to port {remote}" if remote else "")
    return target


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()[1:]
    except OSError:
        return []


class SocketFiles:
    """Paths that this process binds Unix sockets to.

    Closing such a socket leaves its file, and nothing in /proc tells afterwards whose it was: an audit hook writes the
    paths down as they are bound. A hook cannot be removed, so one is made per rank process, never in the test process.
    """

    def __init__(self) -> None:
        self._paths: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "socket.bind" and getattr(args[0], "family", None) == socket.AF_UNIX:
            path = os.fsdecode(args[1]) if isinstance(args[1], (str, bytes)) else ""
            if path and not path.startswith("\0"):
                self._paths.append(os.path.abspath(path))

    def left(self) -> list[str]:
        """Those that are still there."""
        return [f"socket file {path} is still there" for path in self._paths if os.path.exists(path)]


def shm_files() -> frozenset[str]:
    """Names in /dev/shm that belong to this user."""
    found = set()
    try:
        with os.scandir(_SHM) as entries:
            for entry in entries:
                try:
                    if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                        found.add(entry.name)
                except OSError:
                    continue
    except OSError:
        pass
    return frozenset(found)


def shm_left_behind(before: frozenset[str]) -> list[str]:
    """Shared memory that appeared since `before` and that no living process uses.

    Called when the ranks are gone. Somebody else's program may have made a file meanwhile: a file that a process has
    open or mapped is theirs, and so is one that goes away by itself (between a close and its unlink it has no user).
    """
    deadline = time.monotonic() + _SETTLE_S
    left = _unused(shm_files() - before)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left &= _unused(shm_files() - before)
    return [f"shared memory {_SHM / name} is still there" for name in sorted(left)]


def _unused(names: frozenset[str]) -> frozenset[str]:
    used = _files_in_use() if names else set()
    return frozenset(name for name in names if str(_SHM / name) not in used)


def _files_in_use() -> set[str]:
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for line in (process / "maps").read_text().splitlines():
                if str(_SHM) in line:
                    used.add(line[line.index(str(_SHM)) :])
            for fd in (process / "fd").iterdir():
                used.add(os.readlink(fd))
        except OSError:
            continue  # ended meanwhile, or another user's
    return used
