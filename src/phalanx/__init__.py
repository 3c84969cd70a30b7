"""Phalanx: data-parallel training for PyTorch in which the ranks hold the line."""

from phalanx import errors, events
from phalanx.api.ddp import DistributedDataParallel
from phalanx.api.groups import monitored_barrier, set_timeout, split_group
from phalanx.api.replicate import (
    accumulate,
    is_replicated,
    no_sync,
    replicate,
    step_stats,
    synchronize,
    unreplicate,
    weight,
)
from phalanx.api.world import World, init, shutdown
from phalanx.comm import shm

shm.register()

__version__ = "0.1.0"

__all__ = [
    "DistributedDataParallel",
    "World",
    "accumulate",
    "errors",
    "events",
    "init",
    "is_replicated",
    "monitored_barrier",
    "no_sync",
    "replicate",
    "set_timeout",
    "shutdown",
    "split_group",
    "step_stats",
    "synchronize",
    "unreplicate",
    "weight",
]
