"""Which bucket may leave now: never one before its predecessor, since all ranks must start reductions alike.

The last bucket is held back until the backward pass is over, because its tail tells the other ranks what this one
saw in the whole pass (see `unused`). Its gradients are the last to arrive, so waiting for the end costs it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator


class LaunchOrder:
    """The sequence 0, 1, …, num_buckets - 1 and how far it has come. Pure bookkeeping; the caller launches."""

    def __init__(self, num_buckets: int) -> None:
        self._num_buckets = num_buckets
        self._ready = [False] * num_buckets
        self.next = 0

    def reset(self, ready: list[bool] | None = None) -> None:
        self._ready = list(ready) if ready is not None else [False] * self._num_buckets
        self.next = 0

    def mark_ready(self, bucket: int) -> None:
        self._ready[bucket] = True

    def launchable(self, *, backward_is_over: bool = False) -> Iterator[int]:
        """The buckets that may leave now, in order. Each is counted as launched when it is yielded."""
        limit = self._num_buckets if backward_is_over else self._num_buckets - 1
        while self.next < limit and self._ready[self.next]:
            self.next += 1
            yield self.next - 1

    @property
    def all_ready(self) -> bool:
        return all(self._ready)

    @property
    def all_launched(self) -> bool:
        return self.next == self._num_buckets
