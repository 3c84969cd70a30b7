"""A notice board that the ranks of one group share, on the group's rendezvous store.

Collectives tell a waiting rank nothing about why a peer does not come. The board does: who is where, who failed and
why, who left, and whether the group was aborted. It is read by ranks that have waited for a while, never in a step
that goes well. One flag key says whether any notice exists, so looking costs one round trip.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

import torch.distributed as dist

Kind = Literal["failed", "left", "aborted"]


@dataclass(frozen=True)
class Notice:
    """One rank's statement. `topic` narrows it to one undertaking; an empty topic concerns the whole group."""

    rank: int
    kind: Kind
    topic: str
    reason: str
    life: int = 1


@lru_cache(maxsize=1)
def host_identity() -> str:
    """Equal for two processes that see each other's process ids: same boot, same pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown:{os.getpid()}"


def process_is_alive(pid: int) -> bool:
    """Whether a process of this host still runs; one that ended but was not collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        return state not in "ZX"
    except OSError:
        return False


class Board:
    """One rank's access to the board. Methods that read never block; they return what is there."""

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("phalanx-board", store)
        self._rank = rank
        self._size = size
        self._posted = 0
        # The store may outlive a job that is shut down and begun anew in the same processes, and give it the same keys. All
        # that was said in an earlier life means nothing any more. All ranks have had as many.
        self._life = 1 + self._lives_of(rank)
        self._letters = dist.PrefixStore(str(self._life), self._store)
        self._store.set(f"who/{rank}", json.dumps({"pid": os.getpid(), "host": host_identity(), "life": self._life}))
        self._pids: dict[int, int | None] = {rank: None}

    def post(self, kind: Kind, topic: str, reason: str) -> None:
        notice = Notice(self._rank, kind, topic, reason[:4000], self._life)
        self._store.set(f"notice/{self._rank}/{self._posted}", json.dumps(asdict(notice)))
        self._posted += 1
        self._store.set(f"notices/{self._rank}", str(self._posted))
        self._store.set("any", "1")

    def notices(self) -> list[Notice]:
        if not self._store.check(["any"]):
            return []
        found: list[Notice] = []
        for rank in range(self._size):
            if not self._store.check([f"notices/{rank}"]):
                continue
            for number in range(int(self._store.get(f"notices/{rank}"))):
                found.append(Notice(**json.loads(self._store.get(f"notice/{rank}/{number}"))))
        return [notice for notice in found if notice.life >= self._life]

    def _lives_of(self, rank: int) -> int:
        return int(json.loads(self._store.get(f"who/{rank}"))["life"]) if self._store.check([f"who/{rank}"]) else 0

    def dead_ranks(self) -> list[int]:
        """Ranks of this host whose process is gone. Those elsewhere cannot be looked at."""
        dead = []
        for rank in range(self._size):
            if rank not in self._pids:
                if not self._store.check([f"who/{rank}"]):
                    continue
                who = json.loads(self._store.get(f"who/{rank}"))
                self._pids[rank] = who["pid"] if who["host"] == host_identity() else None
            pid = self._pids[rank]
            if pid is not None and not process_is_alive(pid):
                dead.append(rank)
        return dead

    def try_put(self, key: str, value: bytes) -> None:
        self._letters.set(key, value)  # type: ignore[arg-type]

    def try_get(self, key: str) -> bytes | None:
        return bytes(self._letters.get(key)) if self._letters.check([key]) else None

    def remove(self, key: str) -> None:
        """Forget a key; stores that cannot delete keep it, which costs a few bytes."""
        try:
            self._letters.delete_key(key)
        except RuntimeError:
            return


class Poll:
    """Pauses between looks at the board: short at first, so that a quick peer costs little, then up to 20 ms."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._pause_s = 0.0005

    def expired(self) -> bool:
        return time.monotonic() > self.deadline

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, 0.02)
