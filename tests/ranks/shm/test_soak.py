"""Twenty thousand mixed collectives on four ranks and three overlapping groups: right, and nothing grows."""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import shm
from phalanx.testing import run_ranks

shm.register()
NUM_CALLS = 20_000
MEMBERS = [[0, 1, 2, 3], [0, 1, 2], [1, 3]]


def _usage() -> tuple[int, int, int]:
    """(resident KiB, descriptors, threads)."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count()


def _soak(seed: int) -> None:
    rank = dist.get_rank()
    groups: list[Any] = [dist.new_group(m) for m in MEMBERS]
    chance = random.Random(seed)  # the same on every rank: all must make the same calls in the same order
    under_way: list[tuple[Any, torch.Tensor, float]] = []
    usage = None
    for number in range(NUM_CALLS):
        which = chance.randrange(3)
        kind = chance.choice(
            ["all_reduce", "all_reduce", "broadcast", "all_gather", "reduce_scatter", "async", "arena"]
        )
        numel = int(10 ** chance.uniform(0, 4.2 if number % 50 else 5.5))
        root = chance.randrange(4)
        members, group = MEMBERS[which], groups[which]
        if rank not in members:
            continue
        size, place = len(members), members.index(rank)
        total = float(sum(members))
        t = torch.full((numel,), float(rank))
        if kind == "all_reduce":
            dist.all_reduce(t, group=group)
            assert t[0].item() == t[-1].item() == total
        elif kind == "async":
            under_way.append((dist.all_reduce(t, group=group, async_op=True), t, total))
            if len(under_way) > 5:
                work, t, total = under_way.pop(0)
                work.wait()
                assert t[0].item() == t[-1].item() == total
        elif kind == "broadcast":
            dist.broadcast(t, group=group, group_src=root % size)
            assert t[0].item() == t[-1].item() == members[root % size]
        elif kind == "all_gather":
            outs = [torch.empty(numel) for _ in members]
            dist.all_gather(outs, t, group=group)
            assert [o[-1].item() for o in outs] == members
        elif kind == "reduce_scatter":
            out = torch.empty(numel)
            dist.reduce_scatter(out, [t + d for d in range(size)], group=group)
            assert out[-1].item() == total + size * place
        else:
            buffer = group.allocate(numel, torch.float32)
            buffer.fill_(float(rank))
            dist.all_reduce(buffer, group=group)
            assert buffer[0].item() == buffer[-1].item() == total
            group.release(buffer)
        if number == NUM_CALLS // 4:
            usage = _usage()
    for work, t, total in under_way:
        work.wait()
        assert t[0].item() == total
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group)
    assert usage is not None
    after = _usage()
    assert after[0] - usage[0] < 48 << 10, f"resident memory grew from {usage[0]} to {after[0]} KiB"
    assert after[1] - usage[1] <= 40, f"descriptors grew from {usage[1]} to {after[1]}"
    assert after[2] <= usage[2], f"threads grew from {usage[2]} to {after[2]}"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_thousand_calls() -> None:
    run_ranks(_soak, 4, 11, backend="phalanx", timeout_s=360)
