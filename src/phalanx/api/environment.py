"""The environment variables that decide how a job communicates: the first thing to compare when ranks differ."""

from __future__ import annotations

import os

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_MORE_NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")
_PREFIXES = ("PHALANX_", "TORCH_DISTRIBUTED_", "TORCHELASTIC_", "GLOO_", "TORCH_GLOO_", "TORCH_NCCL_", "NCCL_", "UCC_")


def environment() -> dict[str, str]:
    """What this process was given: the launcher's variables, then those of the backends and of debugging, by name.

    Variables that are not set are not there; torch's `_dump_DDP_relevant_env_vars` prints them as "N/A". Local: gather
    it with `torch.distributed.all_gather_object` to find the rank that differs.
    """
    named = [name for name in (*_NAMES, *_MORE_NAMES) if name in os.environ]
    prefixed = sorted(name for name in os.environ if name.startswith(_PREFIXES))
    return {name: os.environ[name] for name in (*named, *prefixed)}
