"""Only processes of this user and of this job are admitted; a stranger is refused, logged, and does no harm."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

_SCRIPT = """
import logging, sys, torch, torch.distributed as dist
from datetime import timedelta
from phalanx.comm import shm
logging.basicConfig(level=logging.WARNING)
shm.register()
rank, path = int(sys.argv[1]), sys.argv[2]
timeout = timedelta(seconds=20)
dist.init_process_group("phalanx", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timeout)
t = torch.ones(3)
dist.all_reduce(t)
print(t.tolist())
dist.destroy_process_group()
"""


def _start(rank: int, store: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, str(rank), str(store)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _address(store: Path) -> str:
    """Rank 0's socket, as its card in the store gives it away."""
    until = time.monotonic() + 20
    prefixes = ("0/cpu/", "default_pg/0/cpu/", "default_pg/0//cpu/")
    while time.monotonic() < until:
        for prefix in prefixes:
            cards = PrefixStore(prefix, FileStore(str(store), 2))
            if cards.check(["card/0"]):
                return "\0" + str(json.loads(cards.get("card/0"))["address"])
    raise AssertionError("rank 0 did not publish its card")


@pytest.mark.timeout(60)
def test_strangers_are_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = _start(0, store)
    second = None
    strangers = []
    try:
        address = _address(store)
        for word in (b"", b"hello", json.dumps({"rank": 1, "secret": "guessed"}).encode(), b'["rank"]'):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(address)
            if word:
                stranger.send(word)
            strangers.append(stranger)  # the first says nothing at all
        second = _start(1, store)
        outs = [rank.communicate(timeout=40) for rank in (first, second)]
    finally:
        for rank in (first, second):
            if rank is not None:
                rank.kill()
        for stranger in strangers:
            stranger.close()
    assert [out.strip() for out, _ in outs] == ["[2.0, 2.0, 2.0]"] * 2, outs
    assert outs[0][1].count("refused a connection") == 3, outs[0][1]
    assert "does not know the secret of this job" in outs[0][1]
    assert "never said who it is" in outs[0][1]
