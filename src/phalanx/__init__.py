"""Phalanx: data-parallel training for PyTorch in which the ranks hold the line."""

from typing import TYPE_CHECKING, Any

from phalanx import errors, events
from phalanx.api.ddp import DistributedDataParallel
from phalanx.api.environment import environment
from phalanx.api.groups import monitored_barrier, set_timeout, split_group
from phalanx.api.hook import register_hook
from phalanx.api.join import join
from phalanx.api.passes import accumulate, no_sync, step_stats, synchronize, weight
from phalanx.api.precision import NORM_LAYERS, Precision
from phalanx.api.replica import is_replicated
from phalanx.api.replicate import replicate, unreplicate
from phalanx.api.step_in_backward import step_in_backward
from phalanx.api.sync_batch_norm import SyncBatchNorm, synchronize_batch_norm
from phalanx.api.world import World, init, shutdown
from phalanx.comm import shm
from phalanx.compose import compile as compiling
from phalanx.compose import rpc, tensor_parallel
from phalanx.compose.swap import swap_ddp
from phalanx.data import DistributedSampler, gather_exact
from phalanx.optim.averagers import PeriodicModelAverager
from phalanx.optim.hierarchical_averager import HierarchicalModelAverager

if TYPE_CHECKING:
    from phalanx.optim.post_local_sgd import PostLocalSGDOptimizer

shm.register()
compiling.register()
rpc.register()
tensor_parallel.register()

__version__ = "0.1.0"

__all__ = [
    "NORM_LAYERS",
    "DistributedDataParallel",
    "DistributedSampler",
    "HierarchicalModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "Precision",
    "SyncBatchNorm",
    "World",
    "accumulate",
    "environment",
    "errors",
    "events",
    "gather_exact",
    "init",
    "is_replicated",
    "join",
    "monitored_barrier",
    "no_sync",
    "register_hook",
    "replicate",
    "set_timeout",
    "shutdown",
    "split_group",
    "step_in_backward",
    "step_stats",
    "swap_ddp",
    "synchronize",
    "synchronize_batch_norm",
    "unreplicate",
    "weight",
]


def __getattr__(name: str) -> Any:
    if name == "PostLocalSGDOptimizer":  # its base takes torch a second to import
        from phalanx.optim.post_local_sgd import PostLocalSGDOptimizer

        return PostLocalSGDOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
