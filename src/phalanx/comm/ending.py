"""Leaving all process groups, so that none is ended by a thread of its own."""

from __future__ import annotations

import gc
import sys
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

WITHIN_S = 0.25
_ALONE = 2  # references: the list's, and that of the call which counts


def destroy_all_groups() -> None:
    """Destroy all process groups. Not collective.

    Who lets go of a Gloo group last ends its threads, and a thread cannot end itself: it aborts the process. A thread of
    the group may still hold it by a function that was called when a collective was over, as communication hooks have
    (PowerSGD's do). So this one holds each until nobody else does, for a moment at most: what a user's model holds stays.
    """
    groups = list(distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + WITHIN_S
    for index in range(len(groups)):
        while sys.getrefcount(groups[index]) > _ALONE and time.monotonic() < deadline:
            time.sleep(0.001)  # lets the others run
