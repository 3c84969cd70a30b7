"""A stream of collectives for ranks that are about to be hit."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import PhalanxError


def hit_myself_after(seconds: float, number: int, mark: Path) -> None:
    """Send this process a signal in a while; the moment is written down first, for those who must notice."""

    def strike() -> None:
        mark.with_suffix(".new").write_text(f"{time.monotonic()} {os.getpid()}")
        mark.with_suffix(".new").rename(mark)
        os.kill(os.getpid(), number)

    threading.Timer(seconds, strike).start()


def run_until_error(group: Any, *, limit_s: float = 20.0) -> tuple[PhalanxError, float]:
    """All kinds of collectives without end; returns the error that ends them and when it came."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    end = time.monotonic() + limit_s
    number = 0
    try:
        arena = group.allocate(200_000, torch.float32)  # a collective too: the rank may be gone by then
        while time.monotonic() < end:
            number += 1
            numel = (10, 3000, 60_000, 400_000)[number % 4]
            t = torch.full((numel,), float(rank))
            dist.all_reduce(t, group=group)
            assert t[0].item() == size * (size - 1) / 2 and t[-1].item() == t[0].item()
            arena.fill_(1.0)
            work = dist.all_reduce(arena, group=group, async_op=True)
            outs = [torch.empty(numel) for _ in range(size)]
            dist.all_gather(outs, torch.full((numel,), float(rank)), group=group)
            work.wait()
            assert arena[5].item() == size
            assert [o[-1].item() for o in outs] == list(range(size))
            dist.broadcast(t, group=group, group_src=number % size)
            if number % 5 == 0:
                dist.barrier(group)
    except PhalanxError as error:
        return error.with_traceback(None), time.monotonic()  # its frames hold tensors of the arena
    raise AssertionError(f"rank {rank} ran for {limit_s} s and noticed nothing")


def release(mark: Path) -> None:
    """Kill what was stopped, so that the test can end."""
    _, pid = mark.read_text().split()
    os.kill(int(pid), signal.SIGKILL)
