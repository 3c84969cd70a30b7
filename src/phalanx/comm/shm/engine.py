"""Runs the calls of one group, one after the other, in the order in which they were made.

A synchronous call runs on the caller's thread when nothing is queued or running: no hand-over, no second thread. Any
other call is queued for the group's worker thread, so that it overlaps with whatever its caller does next.

What hangs on a work's future (`then`) runs on the worker, and may start further calls of the group and wait for them, as
torch's PowerSGD does. While it does, another worker carries on with the queue; still one call at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.comm.shm.profiling import Span
from phalanx.comm.shm.work import ShmWork

Act = Callable[[bool], None]  # told whether it runs on its caller's thread


@dataclass
class _Task:
    work: ShmWork
    act: Act
    span: Span | None


class Engine:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[_Task] = deque()
        self._busy = False
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._num_in_callbacks = 0

    def run(self, work: ShmWork, act: Act, *, inline: bool, span: Span | None = None) -> ShmWork:
        """Returns the work, which is complete already where the call ran inline. Errors are in the work."""
        task = _Task(work, act, span)
        with self._lock:
            if self._stopping:
                raise RuntimeError(f"group {self._name} has been shut down; {work.name} came too late")
            if not inline or self._busy or self._queue:
                self._queue.append(task)
                self._have_served()
                return work
            self._busy = True
        complete = None
        try:
            complete = self._execute(task, inline=True)
        finally:
            with self._lock:
                self._busy = False
                self._have_served()
        if complete is not None:
            complete()
        return work

    def _have_served(self) -> None:
        """With the lock held: see to it that what is queued is taken up, also if every worker is in a callback."""
        if self._queue and not self._busy and not self._num_idle:
            thread = threading.Thread(target=self._serve, name=f"phalanx-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        elif self._queue or self._stopping:
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._num_idle += 1
                self._changed.wait_for(lambda: not self._busy and (self._queue or self._stopping))
                self._num_idle -= 1
                if not self._queue:
                    return
                task = self._queue.popleft()
                self._busy = True
            complete = self._execute(task, inline=False)
            del task  # or its tensors live until the next call
            with self._lock:
                self._busy = False
                if complete is not None:
                    self._num_in_callbacks += 1
                    self._have_served()
                elif self._stopping:
                    self._changed.notify_all()
            if complete is not None:
                complete()
                del complete
                with self._lock:
                    self._num_in_callbacks -= 1
                    if self._stopping:
                        self._changed.notify_all()

    @staticmethod
    def _execute(task: _Task, *, inline: bool) -> Callable[[], None] | None:
        """Run a call and settle its work; returns what hangs on that, to be run when the next call may begin."""
        error: BaseException | None = None
        try:
            task.act(inline)
        except BaseException as caught:  # also KeyboardInterrupt: the call is half done on this rank
            error = caught
        finally:
            if task.span is not None:
                task.span.end()
        return task.work.settle(error)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new calls, let the queued ones finish. False where they did not in time."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._busy and not self._queue and not self._num_in_callbacks, timeout=timeout_s
            )

    def join(self, timeout_s: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
