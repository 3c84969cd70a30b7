"""What torch offers for backends of certain names only, for any group: here it works on ours too."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.api.world import checked_timeout
from phalanx.comm.process_groups import own_groups_of


def monitored_barrier(
    group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the rank that did not come. Every rank of the group calls it.

    `torch.distributed.monitored_barrier` refuses any backend not named gloo; this one takes the `phalanx` group, and hands
    others on to torch. With `wait_all_ranks` every missing rank is named, not only the first.
    """
    chosen = group if group is not None else distributed_c10d._get_default_group()
    timeout = None if timeout_s is None else timedelta(seconds=checked_timeout(timeout_s, zero_too=True))
    own = getattr(chosen, "monitored_barrier", None)
    if dist.get_backend(chosen) == "phalanx" and own is not None:
        own(timeout, wait_all_ranks)
    else:
        dist.monitored_barrier(chosen, timeout, wait_all_ranks)


def set_timeout(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """How long collectives of this group wait for a peer from now on; local to this rank, so call it on all.

    The groups of their own that modules replicated over this one have got are set with it.
    """
    timeout = timedelta(seconds=checked_timeout(timeout_s))
    chosen = group if group is not None else distributed_c10d._get_default_group()
    for one in (chosen, *own_groups_of(chosen)):
        if hasattr(one, "timeout_s"):  # one of ours
            one.set_timeout(timeout)
        else:
            distributed_c10d._set_pg_timeout(timeout, one)


def split_group(parent: dist.ProcessGroup | None, split_ranks: list[list[int]]) -> dist.ProcessGroup | None:
    """One new group per list of global ranks; returns this rank's, or None. Every rank of the parent calls it.

    `torch.distributed.split_group` is NCCL's. This one makes groups of the parent's own backend, and only the ranks of
    a list take part in making its group.
    """
    chosen = parent if parent is not None else distributed_c10d._get_default_group()
    members = dist.get_process_group_ranks(chosen)
    listed = [rank for ranks in split_ranks for rank in ranks]
    if len(listed) != len(set(listed)):
        raise ValueError(f"each rank may be in one list only, got {split_ranks}")
    strangers = sorted(set(listed) - set(members))
    if strangers:
        raise ValueError(f"ranks {strangers} are not in the parent group, which has {members}")
    mine = [ranks for ranks in split_ranks if dist.get_rank() in ranks]
    if not mine:
        return None
    made = dist.new_group(mine[0], backend=dist.get_backend(chosen), use_local_synchronization=True)
    return made if isinstance(made, dist.ProcessGroup) else None
