"""Whose turn it is to send: of the passes that several contexts run at once in one module, one at a time."""

from __future__ import annotations

import logging
import threading
import time

from phalanx.errors import CollectiveTimeoutError

logger = logging.getLogger(__name__)

WARN_AFTER_S = 20.0


class Floor:
    """Held by a pass from the first bucket it sends to the end of its round. Passes are named by their context."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: int | None = None
        self._promised: int | None = None

    def try_take(self, context: int) -> bool:
        with self._changed:
            return self._take_if_free(context)

    def _take_if_free(self, context: int) -> bool:
        if self._holder is None and self._promised in (None, context):
            self._holder = context
        return self._holder == context

    def take(self, context: int, *, timeout_s: float) -> None:
        """Wait for one's turn."""
        began, warned = time.monotonic(), False
        with self._changed:
            while not self._take_if_free(context):
                waited_s = time.monotonic() - began
                if waited_s > timeout_s:
                    raise CollectiveTimeoutError(self._reason(waited_s))
                if waited_s > WARN_AFTER_S and not warned:
                    warned = True
                    logger.warning("%s", self._reason(waited_s))
                self._changed.wait(1.0)

    def _reason(self, waited_s: float) -> str:
        if self._holder is None:
            return (
                f"another rank is at the pass of context {self._promised}, which has not come to its end here after "
                f"{waited_s:.0f} s. Each pass of several contexts at once needs a thread of the inter-op pool until it is "
                "over: see torch.set_num_interop_threads"
            )
        return f"the pass of context {self._holder} has held the others up for {waited_s:.0f} s"

    def release(self, context: int, *, promise: int | None = None) -> None:
        """Let the next have it; with `promise`, only the pass of that context."""
        with self._changed:
            if self._holder == context:
                self._holder = None
                self._promised = promise
                self._changed.notify_all()
