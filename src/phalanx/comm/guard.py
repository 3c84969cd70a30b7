"""Refusing collectives that not every rank will come to, before they start: one that did would wait for ever.

torch has no hook before a collective, so the process groups' own methods are exchanged for as long as the guard is up.
What it does not see: collectives that start in C++ (functional ones, DTensor's), and those of other threads, which are
not part of the loop that is guarded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_COLLECTIVES = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


class CollectiveGuard:
    """While it is up and not at rest, a collective of this thread on a group not allowed raises `refuse`'s error."""

    def __init__(
        self,
        allowed: Iterable[dist.ProcessGroup],
        refuse: Callable[[str, str], Exception],
        *,
        rests: Callable[[], bool] = lambda: False,
    ) -> None:
        self._allowed = {group.group_name for group in allowed}
        self._refuse = refuse
        self._thread = 0
        self._rests = rests
        self._undo: list[Callable[[], None]] = []

    def raise_up(self) -> None:
        if self._undo:
            return
        self._thread = threading.get_ident()
        # Gloo and NCCL share torch's class; a group written in Python has its own. A copy, made at once: a module that the
        # garbage collector finds, in whichever thread, takes its group out of this table.
        for kind in {type(group) for group in list(distributed_c10d._world.pg_map)}:
            for name in _COLLECTIVES:
                if hasattr(kind, name):
                    self._exchange(kind, name)

    def take_down(self) -> None:
        undo, self._undo = self._undo, []
        for action in reversed(undo):
            action()

    def _exchange(self, kind: type, name: str) -> None:
        original = getattr(kind, name)
        own = vars(kind).get(name)

        @functools.wraps(original)
        def guarded(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            here = threading.get_ident() == self._thread and not self._rests()
            if here and group.group_name not in self._allowed:
                raise self._refuse(name.strip("_"), group.group_desc or group.group_name)
            return original(group, *args, **kwargs)

        setattr(kind, name, guarded)
        self._undo.append(
            functools.partial(setattr, kind, name, own) if own else functools.partial(delattr, kind, name)
        )
