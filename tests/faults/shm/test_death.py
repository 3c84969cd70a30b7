"""A rank that dies, stops, fails or leaves: every survivor says so in time, and names the same rank."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.faults.shm.stream import hit_myself_after, release, run_until_error

from phalanx.comm import shm
from phalanx.errors import CollectiveTimeoutError, PeerFailedError, PeerLostError
from phalanx.testing import run_ranks

shm.register()
KILLED = "a killed rank leaves what the survivors find"


def _killed(victim: int, after_s: float, mark: Path) -> None:
    if dist.get_rank() == victim:
        hit_myself_after(after_s, signal.SIGKILL, mark)
    error, noticed = run_until_error(dist.group.WORLD)
    assert isinstance(error, PeerLostError) and error.lost_ranks == (victim,), repr(error)
    assert f"rank {victim}" in str(error) and "SIGKILL" in str(error), str(error)
    late = noticed - float(mark.read_text().split()[0])
    assert late < 1.0, f"noticed after {late:.2f} s"
    _nothing_left()


def _nothing_left() -> None:
    """After the group is destroyed this process holds no socket, descriptor or mapping of it."""
    dist.destroy_process_group()
    gc.collect()
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    assert not [link for link in links if "memfd:phalanx" in link or "pidfd" in link], links
    maps = Path("/proc/self/maps").read_text()
    assert "phalanx-staging" not in maps, "staging memory is still mapped"


def _exists(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_rank_is_named_by_all_within_a_second_at_25_random_moments(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(25):
        victim, world_size = chance.randrange(4), chance.choice([2, 4, 4])
        victim %= world_size
        run_ranks(
            _killed,
            world_size,
            victim,
            chance.uniform(0.0, 0.15),
            tmp_path / f"mark{number}",
            backend="phalanx",
            expect_exit={victim: -9},
            allow_leaks=KILLED,
        )


def _stopped(victim: int, after_s: float, mark: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    if dist.get_rank() == victim:
        hit_myself_after(after_s, signal.SIGSTOP, mark)
    error, noticed = run_until_error(group)
    late = noticed - float(mark.read_text().split()[0])
    text = str(error)
    assert isinstance(error, CollectiveTimeoutError), repr(error)
    assert f"rank {victim}" in text and "#" in text and "does not answer" in text, text
    assert 0.9 < late < 2.5, f"a timeout of 1 s took {late:.2f} s"
    if dist.get_rank() == (victim + 1) % dist.get_world_size():
        release(mark)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stopped_rank_is_named_at_the_timeout_at_25_random_moments(tmp_path: Path) -> None:
    chance = random.Random(4)
    for number in range(25):
        victim, world_size = chance.randrange(4), chance.choice([2, 3, 4])
        victim %= world_size
        run_ranks(
            _stopped,
            world_size,
            victim,
            chance.uniform(0.0, 0.1),
            tmp_path / f"mark{number}",
            backend="phalanx",
            expect_exit={victim: -9},
            allow_leaks=KILLED,
        )


_SCRIPT = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from phalanx.comm import shm
shm.register()
rank, size, path, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
timeout = timedelta(seconds=20)
dist.init_process_group("phalanx", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timeout)
if rank == 2:
    dist.barrier()
    if how == "raise":
        raise ValueError("the loss is not finite")
    sys.exit(0)
try:
    dist.barrier()  # which rank 2 may have left, and failed, before others have
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    print(type(error).__name__, error)
    dist.destroy_process_group()
"""


def _run_scripts(tmp_path: Path, how: str) -> list[str]:
    store = tmp_path / "store"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SCRIPT]
    ranks = [
        subprocess.Popen(
            [*command, str(r), "4", str(store), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )
        for r in range(4)
    ]
    try:
        said = [rank.communicate(timeout=40) for rank in ranks]
        return [out or err for out, err in said]  # a rank that fails otherwise says so there
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_that_fails_sends_its_cause(tmp_path: Path) -> None:
    for rank, said in enumerate(_run_scripts(tmp_path, "raise")):
        if rank != 2:
            assert said.startswith(PeerFailedError.__name__), said
            assert "rank 2 failed: ValueError: the loss is not finite" in said


def test_a_clean_exit_says_goodbye(tmp_path: Path) -> None:
    for rank, said in enumerate(_run_scripts(tmp_path, "exit")):
        if rank != 2:
            assert said.startswith(PeerLostError.__name__), said
            assert (
                "rank 2 has left the group (its process ended) and is missing in all_reduce(sum) float32[3] #2" in said
            )


def _with_worker(mark: Path) -> None:
    """Rank 1 forks a child, as a DataLoader does, that outlives it holding whatever it inherited."""
    dist.barrier()
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        mark.with_suffix(".child").write_text(str(child))
        hit_myself_after(0.05, signal.SIGKILL, mark)
    try:
        error, noticed = run_until_error(dist.group.WORLD)
        assert isinstance(error, PeerLostError) and error.lost_ranks == (1,)
        assert noticed - float(mark.read_text().split()[0]) < 1.0
        os.kill(int(mark.with_suffix(".child").read_text()), 0)  # the worker lives, and did not hide the death
    finally:
        if dist.get_rank() == 0:
            os.kill(int(mark.with_suffix(".child").read_text()), signal.SIGKILL)


def test_a_forked_worker_does_not_hide_a_dead_rank(tmp_path: Path) -> None:
    run_ranks(
        _with_worker, 2, tmp_path / "mark", backend="phalanx", expect_exit={1: -9}, allow_leaks=KILLED, timeout_s=30
    )


def _stop_then_continue(mark: Path) -> None:
    """The stopped rank wakes after the survivors have given up, and goes on writing into what it thinks is shared."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    tensors = [group.allocate(1_000_000, torch.float32) for _ in range(2)]  # type: ignore[attr-defined]
    rank = dist.get_rank()
    if rank == 1:
        hit_myself_after(0.02, signal.SIGSTOP, mark)
    try:
        while True:
            for t in tensors:
                t.fill_(1.0)
                dist.all_reduce(t, group=group)
    except CollectiveTimeoutError:
        pass
    except PeerLostError:
        assert rank == 1  # woken, it finds that the others are gone
    except RuntimeError:
        assert rank == 1
    if rank == 1:
        for t in tensors:
            t.fill_(7.0)
        peers = group._arena.segments  # type: ignore[attr-defined]
        for number, segment in peers.items():
            if number != 0:
                for memory in segment.peers.values():  # what a late write would hit
                    memory.fill_(7)
        return
    for t in tensors:
        t.fill_(3.0)
    os.kill(int(mark.read_text().split()[1]), signal.SIGCONT)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        assert all(bool((t == 3.0).all()) for t in tensors), "a survivor's memory changed under it"


def test_a_rank_that_wakes_late_changes_no_survivors_memory(tmp_path: Path) -> None:
    run_ranks(_stop_then_continue, 3, tmp_path / "mark", backend="phalanx", allow_leaks=KILLED, timeout_s=30)
