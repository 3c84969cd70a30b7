"""Ranks that wait for each other without a collective, for tests in which one of them fails.

A collective ends on one rank before it ends on another. A rank that leaves a barrier and breaks the group at once, or dies,
may so be noticed by others within the barrier. Here nothing is sent between ranks: all look at the store they met on.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def meet(where: str) -> None:
    """Return when every rank of the default group has called this with the same words. They are good for one meeting."""
    store = distributed_c10d._get_default_store()
    here, all_here = f"phalanx.testing/{where}/here", f"phalanx.testing/{where}/all here"
    if store.add(here, 1) == dist.get_world_size():
        store.set(all_here, "")
    store.wait([all_here])
