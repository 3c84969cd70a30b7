"""`skip_all_reduce_unused_params` where ranks, or steps, use different parameters: an error on every rank, no hang."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches
from tests.ranks.replicas import assert_gradients, average_gradients, batch
from torch import nn

import phalanx as px
from phalanx.errors import GroupAbortedError, MismatchError, PhalanxError, ReducerStateError
from phalanx.testing import meet, run_ranks

EVERYWHERE = [(2, "gloo"), (3, "gloo"), (2, "phalanx"), (3, "phalanx")]


def skipping() -> px.DistributedDataParallel:
    return px.DistributedDataParallel(
        Branches(), find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=0.00005
    )


def use(model: nn.Module, rank: int, step: int, which: tuple[int, ...]) -> torch.Tensor:
    return model(batch(rank, step), which).square().sum()


def check_first_step() -> None:
    rank = dist.get_rank()
    model = skipping()
    with pytest.raises(MismatchError, match=r"all ranks use the same parameters, but ranks \[\d.*branches\.1"):
        use(model, rank, 0, (0, 1) if rank == 0 else (0,)).backward()


def check_later_step() -> None:
    """One rank's graph changes. It says which parameters, and whoever waits for it is woken."""
    rank = dist.get_rank()
    model, reference = skipping(), Branches()
    for step in range(2):
        model.zero_grad()
        use(model, rank, step, (0,)).backward()
        assert_gradients(model.module, average_gradients(reference, lambda m, r, s: use(m, r, s, (0,)), step))
    meet("two steps are over")  # the group is about to be aborted, and with it whatever is under way on it
    expected, names = (ReducerStateError, r"are used and were unused.*branches\.1") if rank == 1 else (PhalanxError, "")
    with pytest.raises(expected, match=names):
        use(model, rank, 2, (0, 1) if rank == 1 else (0,)).backward()
    with pytest.raises((GroupAbortedError, PhalanxError)):
        use(model, rank, 3, (0,)).backward()


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
@pytest.mark.parametrize("check", [check_first_step, check_later_step])
def test_ranks_that_differ_are_told(check, world_size: int, backend: str) -> None:
    run_ranks(check, world_size, backend=backend, allow_leaks="a group that was aborted")
