"""Ranks that call different things get an error that shows both calls: never a hang, never wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.comm import shm
from phalanx.errors import MismatchError
from phalanx.testing import run_ranks

shm.register()

Call = Callable[[], Any]


def _calls(name: str, rank: int) -> tuple[Call, list[str]]:
    """What this rank calls, and what every rank's error must show."""
    odd = rank == 1
    t = torch.ones(4)
    big = torch.ones(50_000)
    if name == "collective":
        return (lambda: dist.barrier()) if odd else (lambda: dist.all_reduce(t)), [
            "barrier",
            "all_reduce(sum) float32[4]",
        ]
    if name == "shape":
        return lambda: dist.all_reduce(torch.ones(5) if odd else t), ["float32[5]", "float32[4]"]
    if name == "large shape":
        return lambda: dist.all_reduce(torch.ones(60_000) if odd else big), ["float32[60000]", "float32[50000]"]
    if name == "dtype":
        return lambda: dist.all_reduce(t.double() if odd else t), ["float64[4]", "float32[4]"]
    if name == "operation":
        op = dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        return lambda: dist.all_reduce(t, op), ["all_reduce(max)", "all_reduce(sum)"]
    if name == "root":
        return lambda: dist.broadcast(t, 1 if odd else 0), ["root 1", "root 0"]
    if name == "length":
        outs = [torch.zeros(3) for _ in range(dist.get_world_size())]
        if odd:
            outs[1] = torch.zeros(2)
        return lambda: dist.all_gather(outs, torch.ones(2 if odd else 3)), ["8 bytes", "12 bytes"]
    if name == "allocate":
        group: Any = dist.group.WORLD
        return lambda: group.allocate(8 if odd else 9, torch.float32), ["8 x torch.float32", "9 x torch.float32"]
    raise AssertionError(name)


def _disagree(name: str) -> None:
    dist.barrier()
    call, shown = _calls(name, dist.get_rank())

    def call_and_meet() -> None:
        call()
        dist.barrier()  # a rank whose part was over before the others noticed learns of it here

    with pytest.raises(MismatchError) as caught:
        call_and_meet()
    for text in [*shown, "rank 1", "#2"]:
        assert text in str(caught.value), f"{text!r} is not in {caught.value}"
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(1))  # the group is of no more use, and says why


@pytest.mark.parametrize(
    "name", ["collective", "shape", "large shape", "dtype", "operation", "root", "length", "allocate"]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_both_calls_are_shown(name: str, world_size: int) -> None:
    run_ranks(_disagree, world_size, name, backend="phalanx", timeout_s=20)


def _p2p_disagree() -> None:
    for numel in (4, 100_000):  # a letter, and an offer that is refused
        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(numel), 1)
            if numel > 10_000:
                with pytest.raises(MismatchError, match="rank 0 sent float32"):
                    work.wait()
        else:
            with pytest.raises(MismatchError, match=r"rank 0 sent float32\[\d+\].*rank 1 receives float64"):
                dist.recv(torch.ones(numel, dtype=torch.float64), 0)
    dist.barrier()  # such a mistake concerns these two calls alone


def test_a_message_of_another_dtype_is_refused() -> None:
    run_ranks(_p2p_disagree, 2, backend="phalanx", timeout_s=20)
