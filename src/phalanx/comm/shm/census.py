"""The groups alive in this process, for the two moments that concern them all: its end, and a fork.

At its end a process says goodbye, or why it fails, so that its peers need not guess. A forked child (a DataLoader
worker) lets go of its parent's sockets and memory at once.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import threading
import traceback
import weakref
from typing import Protocol

from phalanx.comm.shm import event_loop

log = logging.getLogger("phalanx.comm.shm")


class Living(Protocol):
    def _last_words(self, cause: str | None) -> None: ...

    def _forked(self) -> None: ...


_groups: weakref.WeakSet[Living] = weakref.WeakSet()
_lock = threading.Lock()
_armed = 0  # the process in which the handlers of exit are in place


def enrol(group: Living) -> None:
    global _armed
    with _lock:
        _groups.add(group)
        if _armed != os.getpid():  # a forked multiprocessing child forgets its parent's handlers
            if not _armed:
                os.register_at_fork(after_in_child=_after_fork)
            _armed = os.getpid()
            atexit.register(_at_exit)
            # a multiprocessing child ends without atexit; its finalizers run while the exception is under way
            multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)


def strike_off(group: Living) -> None:
    with _lock:
        _groups.discard(group)


def _at_exit() -> None:
    if os.getpid() != _armed:
        return
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if isinstance(error, SystemExit) and error.code in (None, 0):
        error = None
    cause = "".join(traceback.format_exception_only(error)).strip() if error is not None else None
    for group in list(_groups):
        try:
            group._last_words(cause)
        except Exception:
            log.exception("a group could not say goodbye")


def _after_fork() -> None:
    global _lock, _groups
    _lock = threading.Lock()
    event_loop.forget_in_child()
    groups, _groups = list(_groups), weakref.WeakSet()
    for group in groups:
        group._forked()
