"""One background thread per process that watches over every group: control messages, dead peers, point-to-point.

Everything that touches the registered descriptors runs on this thread, so a descriptor is never closed while its
handler runs.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger("phalanx.comm.shm")

Handler = Callable[[int], None]


class EventLoop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._handlers: dict[int, Handler] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="phalanx-watch", daemon=True)
        self._thread.start()

    def post(self, act: Callable[[], None]) -> None:
        """Run `act` on the loop's thread, soon."""
        with self._lock:
            if self._stopped:
                return
            self._calls.append(act)
            os.eventfd_write(self._wake_fd, 1)

    def call(self, act: Callable[[], None], *, timeout_s: float = 30.0) -> None:
        """Run `act` on the loop's thread and wait for it."""
        if threading.current_thread() is self._thread:
            act()
            return
        done = threading.Event()

        def run() -> None:
            try:
                act()
            finally:
                done.set()

        self.post(run)
        if not done.wait(timeout_s):
            log.error("the watching thread did not answer within %.0f s", timeout_s)

    def add(self, fd: int, events: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """On the loop's thread only: run `act` on it after a while."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), act))

    def stop(self) -> None:
        """End the thread. What is posted from now on is dropped."""

        def end() -> None:
            self._stopped = True

        self.post(end)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            self._calls.clear()
            self._epoll.close()
            os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._stopped:
            wait_s = max(self._timers[0][0] - time.monotonic(), 0.0) if self._timers else None
            for fd, events in self._epoll.poll(wait_s):
                handler = self._handlers.get(fd)
                if fd == self._wake_fd:
                    try:
                        os.eventfd_read(fd)
                    except BlockingIOError:
                        pass
                elif handler is not None:
                    self._guarded(lambda h=handler, e=events: h(e))  # type: ignore[misc]
            while True:
                with self._lock:
                    act = self._calls.popleft() if self._calls else None
                if act is None:
                    break
                self._guarded(act)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guarded(heapq.heappop(self._timers)[2])
        self.close()

    @staticmethod
    def _guarded(act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            log.exception("a handler of the watching thread failed")


_lock = threading.Lock()
_loop: EventLoop | None = None
_users = 0


def retain() -> EventLoop:
    """The process's loop, started for its first user. Each `retain` is followed by one `dismiss`."""
    global _loop, _users
    with _lock:
        if _loop is None:
            _loop = EventLoop()
        _users += 1
        return _loop


def dismiss() -> None:
    """The last user gone, the thread and its descriptors go too."""
    global _loop, _users
    with _lock:
        _users -= 1
        loop = _loop if _users == 0 else None
        if loop is not None:
            _loop = None
    if loop is not None:
        loop.stop()


def forget_in_child() -> None:
    """After a fork: the thread is gone and the descriptors are the parent's."""
    global _loop, _lock, _users
    _lock = threading.Lock()
    if _loop is not None:
        _loop.close()
    _loop, _users = None, 0
