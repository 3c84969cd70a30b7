"""The warm server: `python -m phalanx.testing.server FD`.

It imports torch and Phalanx once and then forks ranks on request. Because it forks, it must stay a process that can be
forked: it never runs a tensor operation, never initialises CUDA and never has a second thread (a lock held by a thread
that does not exist in the child is a deadlock there). That is checked before every fork, not hoped for.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import socket
import sys

import torch

from phalanx.testing import wire
from phalanx.testing.crew import ClientGone, Crew
from phalanx.testing.keeper import StoreKeeper

_PR_SET_CHILD_SUBREAPER = 36


def why_not_forkable() -> str:
    """Why forking this process could hang its children, or nothing."""
    if torch.cuda.is_initialized():
        return "CUDA is initialised in the server"
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return ""  # no /proc: trust
    if len(threads) == 1:
        return ""
    names = []
    for thread in threads:
        with open(f"/proc/self/task/{thread}/comm") as comm:
            names.append(comm.read().strip())
    return f"the server has {len(threads)} threads ({', '.join(names)}): something starts one at import"


def serve(client: socket.socket) -> None:
    """Answer requests until the client closes its end; then everything that was started ends too."""
    _adopt_orphans()
    wakeup, signalled = socket.socketpair()
    for end in (wakeup, signalled):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    keeper = StoreKeeper()
    gc.collect()
    gc.freeze()  # the children share what is loaded here; a collection in them would copy it
    wire.send(client, "ready")
    for run in range(sys.maxsize):
        try:
            request: wire.RunRequest = wire.receive(client)
        except (EOFError, ConnectionError):
            return
        _preload(request)
        refusal = why_not_forkable()
        if refusal:
            wire.send(client, wire.RunResult(refused=refusal))
            continue
        crew = Crew(request, f"run{run}", keeper.port, client, wakeup, keeper.pid)
        try:
            result = crew.run()
            wire.send(client, result)
        except (ClientGone, ConnectionError):
            return
        if crew.keeper_died:
            keeper.close()
            keeper = StoreKeeper()


def _adopt_orphans() -> None:
    """Become the parent of what a rank leaves running, so that it can be found and ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _preload(request: wire.RunRequest) -> None:
    """Import what the test process has imported of torch, Phalanx and pytest, once instead of in every rank."""
    sys.path[:] = request.sys_path
    for name in request.preload:
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except BaseException:
                continue  # the rank that needs it will say why, with a traceback


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
