"""The last words of a process: why it leaves, posted where its peers look before they give it up for lost.

A peer that waits for this process sees only a closed connection. With the exception's text on the board it can say
what really happened, on every rank, and the user reads the cause once instead of a chain of broken connections.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from types import TracebackType

from phalanx.comm.board import Board

_boards: weakref.WeakSet[Board] = weakref.WeakSet()
_state = threading.Lock()
_installed_in: int | None = None
_cause: str | None = None


def say_farewell_on(board: Board) -> None:
    """From now on, this process's end by an exception is told on `board`."""
    global _installed_in
    with _state:
        _boards.add(board)
        if _installed_in != os.getpid():
            _installed_in = os.getpid()
            _install()


def _install() -> None:
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        farewell(f"{kind.__name__}: {error}")
        before(kind, error, trace)

    sys.excepthook = told
    atexit.register(_at_exit)


def farewell(reason: str) -> None:
    """Tell every board now. Said once: the first cause is the one that counts."""
    global _cause
    if _cause is not None or os.getpid() != _installed_in:
        return
    _cause = reason
    for board in list(_boards):
        try:
            board.post("left", "", reason)
        except Exception:
            continue


def _at_exit() -> None:
    _boards.clear()
