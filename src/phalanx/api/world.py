"""Joining the job: `init` reads what the launcher left in the environment; alone, it makes a world of one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.api import engines
from phalanx.comm.ending import destroy_all_groups


@dataclass(frozen=True)
class World:
    """This process's place in the job. `device` is where its model belongs."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


def init(*, backend: str | None = None, timeout_s: float | None = None) -> World:
    """Join the job and return this process's place in it. Calling again returns the same place, and changes nothing.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets. Without them it makes a world of
    one, so that a script runs unchanged by itself. Every process of the job calls it once, before anything distributed.

    Args:
        backend: what torch.distributed calls a backend; by default ``phalanx``, shared memory on one host.
        timeout_s: how long a collective waits for a peer, also in the groups that replicated modules get; torch's
            default otherwise. `phalanx.set_timeout` changes it later.
    """
    if not dist.is_available():
        raise RuntimeError("this build of PyTorch has no torch.distributed; install one that has")
    if timeout_s is not None:
        checked_timeout(timeout_s)
    if backend is not None:
        _check_backend(backend)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _check_nothing_new(backend, timeout_s)
    else:
        _join(backend or _default_backend(has_cuda), timeout_s)
    return World(dist.get_rank(), dist.get_world_size(), local_rank, device, str(dist.get_backend()))


def checked_timeout(timeout_s: float, *, zero_too: bool = False) -> float:
    """The number, or an error that says what a time-out is."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s takes a number of seconds, got {timeout_s!r}")
    if timeout_s < 0 or (timeout_s == 0 and not zero_too) or timeout_s != timeout_s:
        raise ValueError(f"a time-out is a positive number of seconds, got {timeout_s!r}")
    return timeout_s


def _check_backend(backend: str) -> None:
    if not isinstance(backend, str):
        raise TypeError(f"backend takes a name like 'phalanx' or 'gloo', got {backend!r}")
    known = [name.lower() for name in dist.Backend.backend_list]
    asked = [part.partition(":")[2] or part for part in backend.lower().split(",")]
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ValueError(f"there is no backend {unknown[0]!r}; torch.distributed knows {', '.join(sorted(set(known)))}")


def _check_nothing_new(backend: str | None, timeout_s: float | None) -> None:
    """`init` again, or after `init_process_group`: what it asks for must be what there is."""
    present = str(dist.get_backend())
    if backend is not None and backend.lower() not in (present, str(dist.get_backend_config()).lower()):
        raise ValueError(
            f"this process has joined its job with backend {present}, and {backend} is asked for now: call "
            "phalanx.shutdown first, or make a group with torch.distributed.new_group"
        )
    if timeout_s is not None:
        raise ValueError("this process has joined its job already: change its time-out with phalanx.set_timeout")


def _join(backend: str, timeout_s: float | None) -> None:
    timeout = timedelta(seconds=timeout_s) if timeout_s is not None else None
    present = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    if not present:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}: "
            "start this script with torchrun, set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
            "or none of them to run alone"
        )
    dist.init_process_group(backend, timeout=timeout)


def _default_backend(has_cuda: bool) -> str:
    """Shared memory for CPU tensors where it can be had; the `phalanx` group hands CUDA tensors to NCCL by itself."""
    if "PHALANX" in dist.Backend._plugins:
        return "phalanx"
    return "cpu:gloo,cuda:nccl" if has_cuda else "gloo"


def shutdown() -> None:
    """Leave the job. Safe to call twice, or without `init`."""
    if dist.is_available() and dist.is_initialized():
        engines.end()
        destroy_all_groups()
