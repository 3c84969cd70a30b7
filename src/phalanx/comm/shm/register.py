"""Makes `torch.distributed.init_process_group("phalanx")` work."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

NAME = "phalanx"


def register() -> None:
    """Register the backend with torch.distributed. Any number of times; does nothing where it cannot run."""
    if not sys.platform.startswith("linux") or not dist.is_available():
        return
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> Any:
    from phalanx.comm.shm.process_group import PhalanxGroup

    if backend_options is not None:
        raise TypeError(f"the phalanx backend has no pg_options, got {type(backend_options).__name__}")
    return PhalanxGroup(
        options.store, options.group_rank, options.group_size, options.timeout, name=str(options.group_id)
    )
