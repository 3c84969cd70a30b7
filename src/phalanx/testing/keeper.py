"""The store that ranks meet in: a process of its own.

It cannot live in the server (a store's server is a thread, and a process with threads must not fork ranks) nor in rank
0 (tests kill rank 0). One keeper serves all runs, each under its own prefix; a run pays for a connection, nothing else.
"""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from typing import NoReturn

from torch.distributed import TCPStore  # torch does not list it

from phalanx.testing.rank import die_with_parent


class StoreKeeper:
    """A forked process that owns a `TCPStore` on a free port of the loopback interface until `close`."""

    def __init__(self) -> None:
        server_pid = os.getpid()
        announce_r, announce_w = os.pipe()
        lifeline_r, self._lifeline = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(announce_r)
            os.close(self._lifeline)
            _keep(announce_w, lifeline_r, server_pid)
        os.close(announce_w)
        os.close(lifeline_r)
        with os.fdopen(announce_r, "rb") as pipe:
            announced = pipe.read()
        if not announced:
            raise RuntimeError("the store keeper ended before it had a port")
        self.port = int(announced)

    def close(self) -> None:
        """Let the keeper end. The server reaps it with its other children."""
        os.close(self._lifeline)


def _keep(announce: int, lifeline: int, server_pid: int) -> NoReturn:
    try:
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        # Of our own making, because it is IPv4 alone. A store's own socket is IPv6 too, sees peers as ::ffff:127.0.0.1
        # and asks the name server who that is at every connection: up to 5 s each where none answers.
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        os.write(announce, str(store.port).encode())
        os.close(announce)
        os.read(lifeline, 1)  # nothing is ever written: this returns when the server has closed its end or died
    finally:
        os._exit(0)
