"""A barrier for finding out who is missing. It goes through the store, so that nothing that waits in it can break."""

from __future__ import annotations

import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from phalanx.errors import CollectiveTimeoutError

_VERDICT_S = 1.0  # rank 0 waits out its own timeout before it says who is missing


class MonitoredBarrier:
    """Rank 0 waits for every other rank, then lets all go; or tells all who did not come."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._number = 0

    def wait(self, timeout_s: float, *, wait_all_ranks: bool) -> None:
        """Every rank calls it. With `wait_all_ranks` the error lists all that are missing, not just the first."""
        self._number += 1
        if self._rank == 0:
            self._lead(timeout_s, wait_all_ranks)
        else:
            self._follow(timeout_s)

    def _lead(self, timeout_s: float, wait_all_ranks: bool) -> None:
        deadline = time.monotonic() + timeout_s
        missing: list[int] = []
        for rank in range(1, self._size):
            key = f"{self._number}/{rank}"
            if not self._came(key, max(deadline - time.monotonic(), 0.001)):
                missing.append(rank)
                if not wait_all_ranks:
                    break
            else:
                self._store.delete_key(key)
        verdict = ""
        if missing:
            ranks = ", ".join(map(str, missing))
            verdict = (
                f"Rank 0 timed out in monitoredBarrier: rank{'s' * (len(missing) > 1)} {ranks} failed to pass it in "
                f"{timeout_s * 1000:.0f} ms"
            )
        self._store.set(f"{self._number}/verdict", verdict or "all came")
        if missing:
            raise CollectiveTimeoutError(verdict, rank=0)
        if self._number > 1:
            self._store.delete_key(f"{self._number - 1}/verdict")

    def _follow(self, timeout_s: float) -> None:
        self._store.set(f"{self._number}/{self._rank}", "here")
        key = f"{self._number}/verdict"
        if not self._came(key, timeout_s + _VERDICT_S):
            text = (
                f"Rank {self._rank} timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms: no word from rank 0"
            )
            raise CollectiveTimeoutError(text, rank=self._rank)
        verdict = self._store.get(key).decode()
        if verdict != "all came":
            raise CollectiveTimeoutError(f"rank 0 reports: {verdict}", rank=self._rank)

    def _came(self, key: str, timeout_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            return False
        return True
