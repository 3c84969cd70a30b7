"""The test process's end of the warm server: start it once, ask it, end it with the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO

from phalanx.testing import wire

_START_S = 120.0
_STOP_S = 5.0

# Imported in the server when the test process has them: safe to import before a fork (no tensor operation, no thread).
_PRELOADED = (
    "phalanx",
    "torch.distributed",
    "torch.nn",
    "torch.optim",
    "torch.utils",
    "torch.testing",
    "torch._dynamo",
)
_PRELOADED_ROOTS = ("pytest", "_pytest", "hypothesis", "numpy")


class ServerLost(RuntimeError):
    """The warm server could not start, or ended in the middle of a run."""


class _Server:
    """One server process and the socket to it. Closing the socket ends the server and everything it started."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise ServerLost("phalanx.testing forks its ranks, which this system cannot do")
        self.socket, theirs = socket.socketpair()
        self.log: IO[bytes] = tempfile.TemporaryFile()
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        # Libraries that start a pool of threads at import (OpenBLAS does) would make the server unfit to fork.
        env.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phalanx.testing.server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env=env,
                start_new_session=True,  # Ctrl-C is for the test process, which then closes the socket
            )
        self._ready = False

    def ask(self, request: wire.RunRequest) -> wire.RunResult:
        try:
            if not self._ready:
                self.socket.settimeout(_START_S)
                wire.receive(self.socket)
                self._ready = True
            # The server keeps the run's own limit; this one is for a server that is stuck itself.
            self.socket.settimeout(request.timeout_s + request.grace_s + 60.0)
            wire.send(self.socket, request)
            result: wire.RunResult = wire.receive(self.socket)
        except (OSError, EOFError) as error:
            self.log.seek(0)
            log = self.log.read().decode(errors="replace").strip()
            raise ServerLost(f"the warm server ended or does not answer: {error}\n{log}") from error
        return result

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


_server: _Server | None = None
_owner_pid = 0
_lock = threading.Lock()


def warm_up() -> None:
    """Start the server without waiting for it, so that it imports torch while the test process does other things."""
    global _server, _owner_pid
    if _owner_pid != os.getpid():  # a fork of the test process must not talk on its parent's socket
        _server, _owner_pid = None, os.getpid()
        atexit.register(shut_down)
    if _server is None or _server.process.poll() is not None:
        _server = _Server()


def shut_down() -> None:
    """End the server and whatever it started. Called at exit; a later run starts a new one."""
    global _server
    if _server is not None and _owner_pid == os.getpid():
        server, _server = _server, None
        server.close()


def ask(request: wire.RunRequest) -> wire.RunResult:
    """Have the server run a request. Raises `ServerLost`; on any other exception (Ctrl-C) the ranks are ended too."""
    with _lock:
        warm_up()
        assert _server is not None
        with _ending_ranks_on_error():
            return _server.ask(request)


@contextlib.contextmanager
def _ending_ranks_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException:
        shut_down()
        raise


def preloadable() -> tuple[str, ...]:
    """Modules that this process has loaded and that the server may load before it forks."""
    return tuple(
        name
        for name in list(sys.modules)
        if name.split(".")[0] in _PRELOADED_ROOTS or any(name == p or name.startswith(p + ".") for p in _PRELOADED)
    )
