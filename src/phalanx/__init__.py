"""Phalanx: data-parallel training for PyTorch in which the ranks hold the line."""

from phalanx import errors, events
from phalanx.api.ddp import DistributedDataParallel
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
    "no_sync",
    "replicate",
    "shutdown",
    "step_stats",
    "synchronize",
    "unreplicate",
    "weight",
]
