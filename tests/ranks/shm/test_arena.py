"""Memory that the group allocates: reduced in place, handed back, and still there when the group is gone."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import shm
from phalanx.testing import ranks

shm.register()


def _group() -> Any:
    return dist.group.WORLD


@ranks(3, backend="phalanx")
def test_a_tensor_outlives_the_group() -> None:
    t = _group().allocate(1_000_000, torch.float32)
    t.fill_(float(dist.get_rank() + 1))
    dist.all_reduce(t)
    dist.destroy_process_group()
    assert bool((t == 6.0).all())
    t.mul_(2)
    assert t.sum().item() == 12_000_000
    assert "memfd:phalanx" in Path("/proc/self/maps").read_text()
    del t
    assert "memfd:phalanx" not in Path("/proc/self/maps").read_text(), "the memory goes with its last tensor"


@ranks(2, backend="phalanx")
def test_memory_given_back_is_used_again() -> None:
    first = _group().allocate(500_000, torch.float32)
    address = first.data_ptr()
    _group().release(first)
    again = _group().allocate(480_000, torch.float32)
    assert again.data_ptr() == address
    other = _group().allocate(480_000, torch.float32)
    assert other.data_ptr() != address
    with pytest.raises(ValueError, match="release"):
        _group().release(torch.ones(3))


@ranks(2, backend="phalanx")
def test_an_arena_tensor_meets_an_ordinary_one() -> None:
    t = _group().allocate(100_000, torch.float32) if dist.get_rank() == 0 else None
    if dist.get_rank() == 1:
        _group().allocate(100_000, torch.float32)
    t = t if t is not None else torch.empty(100_000)
    t.fill_(float(dist.get_rank() + 1))
    dist.all_reduce(t)
    assert bool((t == 3.0).all())


@ranks(2, backend="phalanx", timeout_s=60)
def test_nothing_is_copied_and_no_shared_memory_file_is_used() -> None:
    before = set(os.listdir("/dev/shm"))
    t = _group().allocate(32 << 20, torch.float32)  # 128 MiB: twice what a container's /dev/shm holds
    t.fill_(1.0)
    dist.all_reduce(t)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(3):
        dist.all_reduce(t, dist.ReduceOp.AVG)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown_kib < 8 << 10, f"{grown_kib} KiB more than after the first call"
    assert bool((t == 2.0).all())
    new = {name for name in os.listdir("/dev/shm") if not name.startswith(("torch_", "sem."))} - before
    assert not new  # but for what data loaders of other tests may have there for a moment


@ranks(2, backend="phalanx")
def test_a_forked_child_writes_to_memory_of_its_own() -> None:
    t = _group().allocate(10_000, torch.float32)
    t.fill_(1.0)
    dist.barrier()
    child = os.fork()
    if child == 0:
        t.fill_(5.0)  # no torch call in the child may reach the parent's peers
        code = 0
        try:
            dist.all_reduce(torch.ones(1))
            code = 1
        except RuntimeError as error:
            code = 0 if "was forked from rank" in str(error) else 2
        os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bool((t == 1.0).all())
    dist.all_reduce(t)
    assert bool((t == 2.0).all())


@ranks(3, backend="phalanx")
def test_sums_have_the_same_bits_on_every_rank_and_in_every_way() -> None:
    torch.manual_seed(dist.get_rank())
    source = torch.randn(300_000) * 10 ** torch.randint(-6, 6, (300_000,))
    staged, direct = source.clone(), _group().allocate(300_000, torch.float32)
    direct.copy_(source)
    dist.all_reduce(staged)
    dist.all_reduce(direct)
    small = source[:5000].clone()
    dist.all_reduce(small)
    assert torch.equal(staged, direct) and torch.equal(small, staged[:5000])
    everyone = [torch.empty_like(staged) for _ in range(3)]
    dist.all_gather(everyone, staged)
    assert all(torch.equal(e, staged) for e in everyone)
    parts = [torch.empty_like(source) for _ in range(3)]
    dist.all_gather(parts, source)
    assert torch.equal(staged, parts[0] + parts[1] + parts[2])
