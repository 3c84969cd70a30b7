"""What torch gates on a backend's name, on ours: monitored barrier, time-outs, splitting."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.comm.c10d import group_of
from phalanx.comm.process_groups import own_group
from phalanx.testing import ranks


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_monitored_barrier_names_who_is_missing(backend: str) -> None:
    _missing(backend)


@ranks(3, backend=None, allow_leaks="rank 1 stays away from a barrier, and its group is not closed by all")
def _missing(backend: str) -> None:
    dist.init_process_group(backend)
    px.monitored_barrier(timeout_s=5)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"(?i)rank.? *1"):
            px.monitored_barrier(timeout_s=0.5)


@ranks(2, backend="phalanx")
def test_what_it_hands_to_nccl_is_waited_for_as_nccls() -> None:
    """A time-out in waiting for NCCL's works is no poll: it ends the communicator."""
    for group in (dist.group.WORLD, own_group(dist.group.WORLD)):
        adapter = group_of(group)
        assert adapter.waits_on_streams(torch.device("cuda", 0))
        assert not adapter.waits_on_streams(torch.device("cpu"))
        assert adapter._backend_for(torch.empty(0)) == "phalanx"
        assert not group.uses_accelerator  # so it may be closed by one rank after the other
    adapter = group_of(dist.new_group(backend="gloo"))
    assert not adapter.waits_on_streams(torch.device("cuda", 0))


@ranks(4, backend="phalanx")
def test_split_groups_reduce_apart() -> None:
    group = px.split_group(None, [[0, 2], [1]])
    rank = dist.get_rank()
    if rank == 3:
        assert group is None
        return
    assert group is not None
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    assert total.item() == {0: 2.0, 1: 1.0, 2: 2.0}[rank]


@ranks(2, backend="phalanx")
def test_split_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="one list only"):
        px.split_group(None, [[0, 1], [1]])
    with pytest.raises(ValueError, match=r"\[7\] are not in the parent group"):
        px.split_group(None, [[0, 7]])


@ranks(2, backend="phalanx", allow_leaks="one rank never joins the collective, so the group ends broken")
def test_set_timeout_holds_from_then_on() -> None:
    px.set_timeout(0.5)
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.all_reduce(torch.ones(1))
        assert time.monotonic() - began < 5
    with pytest.raises(ValueError, match="positive"):
        px.set_timeout(0)


@ranks(2)
def test_a_module_that_lies_where_the_group_carries_nothing() -> None:
    """As one of which `.cuda()` was forgotten, on a group of NCCL: that no peer can be reached is not what is wrong."""
    only_cuda = dist.new_group(backend="cuda:gloo")
    wanted = r"device type cpu: weight is on cpu, and the process group carries cuda tensors alone \(cuda: gloo\)"
    for wrap, expected in ((px.replicate, ValueError), (px.DistributedDataParallel, RuntimeError)):
        with pytest.raises(expected, match=wanted):
            wrap(torch.nn.Linear(2, 2), process_group=only_cuda)
