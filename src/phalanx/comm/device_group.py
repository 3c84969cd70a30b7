"""A group whose device waits for its peers: what this rank has queued there, who looks after it, and giving it up.

The host goes on while the device waits for a collective. What is queued is therefore marked, and the lookout told of it;
and where it will never be over, the communicator is aborted, as the device would keep whoever waits for it next.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.comm import lookout
from phalanx.comm.board_group import BoardGroup, Ledger
from phalanx.comm.device_wait import await_stream, is_capturing
from phalanx.comm.group import Queued
from phalanx.comm.process_groups import accelerator_of
from phalanx.errors import PhalanxError, ranks_behind

logger = logging.getLogger(__name__)

# How long a communicator's abort is waited for: it goes on by itself, but what comes then may need it.
ABORTED_WITHIN_S = 1.0

_given_up: set[DeviceGroup] = set()  # those that use such a group later are to be told why it is of no use


class DeviceGroup(BoardGroup):
    """The part of a group that has to do with works which streams wait for, and not the host."""

    def __init__(self, ledger: Ledger, process_group: dist.ProcessGroup) -> None:
        super().__init__(ledger, rank=process_group.rank(), size=process_group.size(), name=process_group.group_name)
        self.process_group = process_group
        self._has_aborted = False  # this rank, and not another
        self._queued: tuple[weakref.ref[Queued], ...] = ()  # another each time: another thread reads it
        self._marks: dict[torch.device, lookout.Marks] = {}

    @abstractmethod
    def adapter_of(self, process_group: dist.ProcessGroup) -> DeviceGroup | None:
        """The group that stands before another process group, if there is one."""

    def _is_waited_for_by_streams(self, device: torch.device) -> bool:
        return self.size > 1 and device.type == "cuda" and self.waits_on_streams(device)

    # -- waiting for it ----------------------------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.is_cuda:
            self.await_device(tensor.device)
        return super().read(tensor)

    def await_device(self, device: torch.device) -> None:
        if not self._is_waited_for_by_streams(device):
            super().await_device(device)
            return
        try:
            await_stream(device, self.check_notices)
        except PhalanxError as error:  # the device still waits, and whoever waits for it next
            self.give_up(error)
            raise
        self.check_alive()

    # -- having it looked after --------------------------------------------------------------------------------------

    def mark(self, device: torch.device) -> None:
        if not self._is_waited_for_by_streams(device) or is_capturing(
            device
        ):  # it would come with each replay, and not now
            return
        marks = self._marks.get(device)
        if marks is None:
            marks = self._marks[device] = lookout.Marks(device, self.watch)
        marks.queue(self.topics.union(*(undertaking.topics for undertaking in self.undertakings)))

    def watch(self, queued: Queued) -> None:
        if self.size > 1:
            self._queued = (*(ref for ref in self._queued if ref() not in (None, queued)), weakref.ref(queued))
            lookout.watch(self)

    def unwatch(self, queued: Queued) -> None:
        self._queued = tuple(ref for ref in self._queued if ref() not in (None, queued))

    def queued(self) -> list[Queued]:
        return [queued for ref in self._queued if (queued := ref()) is not None]

    # -- giving it up --------------------------------------------------------------------------------------------------

    @property
    def is_given_up(self) -> bool:
        return self._has_aborted

    @property
    def is_closed(self) -> bool:
        return self.process_group not in distributed_c10d._world.pg_map

    def give_up(self, cause: PhalanxError) -> None:
        """Abort the communicator of this rank, which waits in vain. Others find out by themselves, or are not concerned."""
        if not self._has_aborted and self.size > 1:
            self._give_up_for(cause, f"what is queued on the device waits in vain, and is broken off: {cause}")

    def give_up_others(self) -> None:
        cause = self._given_up_for
        all_ranks = dist.get_process_group_ranks(self.process_group)
        concerned = {all_ranks[rank] for rank in ranks_behind(cause) if rank < self.size}
        if cause is None or not concerned:
            return
        for other in list(distributed_c10d._world.pg_map):
            if other is self.process_group or not concerned.issubset(dist.get_process_group_ranks(other)):
                continue
            said = f"the device waits on: group {other.group_name} is given up, too"
            known = self.adapter_of(other)  # none is made here: ranks make them alike
            if known is None:
                _abort(other, f"rank {self.rank}: {said}")
            elif not known.is_given_up:
                known._give_up_for(cause, said)

    def _give_up_for(self, cause: PhalanxError, said: str) -> None:
        self._given_up_for = copy.copy(cause).with_traceback(None)
        self._aborted = str(cause)
        self._has_aborted = True
        _given_up.difference_update([group for group in _given_up if group.is_closed])
        _given_up.add(self)
        _abort(self.process_group, f"rank {self.rank}: {said}")


def _abort(process_group: dist.ProcessGroup, said: str) -> None:
    """Abort the communicator of a process group, if it has one, and then log why.

    In a thread of its own: it may wait for the device, which another communicator may keep from going on; and for the lock
    of logging, which one who waits for the device may hold.
    """
    backend = accelerator_of(process_group)

    def abort() -> None:
        try:
            if backend is not None:
                backend.abort()
        except RuntimeError as error:
            logger.warning("could not abort the communicator of group %s: %s", process_group.group_name, error)
        logger.error(said)

    thread = threading.Thread(target=abort, name="phalanx-abort", daemon=True)
    thread.start()
    thread.join(ABORTED_WITHIN_S)
