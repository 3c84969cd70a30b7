"""CUDA tensors of a phalanx group go to NCCL: a group of its own over the same store, made when first needed.

`cpu:phalanx,cuda:nccl` does not do this: a process group written in Python takes the place of the whole pair.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from phalanx.comm.shm.arguments import ArgumentError


class Accelerator:
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: Any = None

    def devices(self) -> list[torch.device]:
        return [torch.device("cuda")] if torch.cuda.is_available() and dist.is_nccl_available() else []

    def group(self, device: torch.device | None = None) -> Any:
        """The inner NCCL backend. The first call on any rank must be one that all ranks make."""
        if not self.devices():
            raise ArgumentError(
                f"a phalanx group takes CPU tensors here, got one on {device}: CUDA with NCCL is not available"
            )
        with self._lock:
            if self._group is None:
                if self._store is None:
                    raise RuntimeError("the group has been shut down")
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                self._group = dist.ProcessGroupNCCL(self._store, self._rank, self._size, options)
                self._group._set_sequence_number_for_group()
            return self._group

    @property
    def in_use(self) -> bool:
        return self._group is not None

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._group is not None:
            self._group._set_default_timeout(timeout)

    def forget_store(self) -> None:
        self._store = None

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
