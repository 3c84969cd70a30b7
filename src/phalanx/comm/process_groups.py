"""c10d's process groups: making one of the same ranks as another, closing it, and what torch knows of one."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def own_group(process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A new group of the same ranks and backend. All its ranks call this together, and no other rank needs to.

    Two modules that share a group and see different unused parameters launch their buckets in different orders, and
    would add up each other's gradients with no error. A group of one's own makes order a matter of one module.
    """
    if process_group.size() == 1:
        return process_group
    ranks = dist.get_process_group_ranks(process_group)
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_of(process_group)),
        backend=_backend_name(process_group),
        # Of all ranks, a group has a number of its own; of some, a name made from them, so that only they need to call.
        use_local_synchronization=process_group.size() != dist.get_world_size(),
        group_desc="phalanx.replicate",
    )
    assert isinstance(made, dist.ProcessGroup)
    _twins.setdefault(process_group, weakref.WeakSet()).add(made)
    return made


def release_group(process_group: dist.ProcessGroup) -> None:
    """Close a group that `own_group` made, on this rank: its sockets and threads would stay until the job's end.

    NCCL's is left to the end: closing a communicator is collective, and this is called when a model is collected. So is
    one of some ranks only: the next of the same ranks would get its name, and find its old addresses in the store.
    """
    known = distributed_c10d._world.pg_map
    if process_group not in known or process_group is dist.group.WORLD or process_group.size() != dist.get_world_size():
        return
    if "nccl" not in backends_of(process_group).values() and not getattr(process_group, "uses_accelerator", False):
        dist.destroy_process_group(process_group)


def own_groups_of(process_group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """Those that `own_group` made as twins of this one, and that are still in use."""
    return [twin for twin in _twins.get(process_group, ()) if twin in distributed_c10d._world.pg_map]


def timeout_of(process_group: dist.ProcessGroup) -> float:
    """How long its collectives wait for a peer, in seconds."""
    if (of_ours := getattr(process_group, "timeout_s", None)) is not None:
        return float(of_ours)
    try:
        device = next(iter(process_group._device_types))
        timeout = process_group._get_backend(device).options._timeout
        return float(timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return float(dist.distributed_c10d.default_pg_timeout.total_seconds())


def backends_of(process_group: dist.ProcessGroup) -> dict[str, str]:
    """The backend for each type of device; under "" the one for all, where the group names only one.

    A group made as another's twin names its backend in the long form, ``cpu:gloo,cuda:nccl``, also where both are one.
    """
    try:
        config = str(dist.get_backend(process_group))
        if ":" not in config:
            config = str(dist.get_backend_config(process_group))
    except (ValueError, RuntimeError, AttributeError):
        config = str(getattr(process_group, "name", lambda: "unknown")())
    if ":" not in config:
        return {"": config.lower()}
    return {device: name for device, _, name in (part.lower().partition(":") for part in config.split(","))}


def accelerator_of(process_group: dist.ProcessGroup) -> Any:
    """What moves its tensors on a GPU; None where nothing does, or has not yet."""
    if not getattr(process_group, "uses_accelerator", True):
        return None  # it would be made now, which takes all ranks
    try:
        return process_group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None


def _backend_name(process_group: dist.ProcessGroup) -> str:
    """As `new_group` takes it. Where all devices have the same: a group that names it for each warns when it is closed."""
    config = str(dist.get_backend_config(process_group)) if hasattr(dist, "get_backend_config") else ""
    names = {part.partition(":")[2] for part in config.split(",")} - {""}
    if len(names) > 1:
        return config
    return names.pop() if names else str(dist.get_backend(process_group))


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """Where its ranks have met: keys set there are seen by them alone."""
    known = distributed_c10d._world.pg_map.get(process_group)
    if known is not None and known[1] is not None:
        return known[1]
    return dist.PrefixStore(process_group.group_name, distributed_c10d._get_default_store())
