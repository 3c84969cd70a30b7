"""The handle of one call, as torch.distributed knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from phalanx.errors import CollectiveTimeoutError


class ShmWork(Work):
    """Completes once, with tensors or with an error. Any thread may wait for it."""

    def __init__(self, name: str, tensors: list[Any], *, source: int = -1) -> None:
        super().__init__()
        self.name = name
        self._tensors = tensors
        self._source = source
        self._error: BaseException | None = None
        self._done = False
        self._lock = threading.Lock()
        self._gate: threading.Event | None = None
        self._future: Any = None
        self._complete_future: Callable[[], None] | None = None

    # ---- the side that executes ------------------------------------------------------------------------------

    def finish(self, error: BaseException | None = None, *, source: int | None = None) -> None:
        complete = self.settle(error, source=source)
        if complete is not None:
            complete()

    def settle(self, error: BaseException | None = None, *, source: int | None = None) -> Callable[[], None] | None:
        """As `finish`, but what hangs on the future is left to the caller, to run where it may block."""
        with self._lock:
            if self._done:
                return None
            self._error = error
            if source is not None:
                self._source = source
            self._done = True
            gate, complete = self._gate, self._complete_future
        if gate is not None:
            gate.set()
        return complete

    # ---- the side that waits ---------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises the error of the call. A timeout of zero, as C++ passes it, means the call's own."""
        if not self._done:
            seconds = timeout.total_seconds()
            with self._lock:
                gate = self._gate = self._gate or threading.Event()
                done = self._done
            if not done and not gate.wait(seconds if seconds > 0 else None):
                raise CollectiveTimeoutError(f"wait({seconds:g} s): Timed out waiting for {self.name}; it goes on")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Any:
        """Carries the list of tensors. It fails through `then`: torch's reducer crashes on `set_exception`."""
        with self._lock:
            if self._future is not None:
                return self._future
            trigger: Any = torch.futures.Future()

            def outcome(_: object) -> list[Any]:
                if self._error is not None:
                    raise self._error
                return self._tensors

            self._future = trigger.then(outcome)
            if not self._done:
                self._complete_future = lambda: trigger.set_result(None)
                return self._future
        trigger.set_result(None)
        return self._future

    getFuture = get_future
