"""`px.init`: under a launcher, alone, and in an environment that is neither."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

import phalanx as px
from phalanx.testing import ranks


@ranks(2, backend=None)
def test_reads_the_launchers_environment() -> None:
    world = px.init()
    assert (world.rank, world.world_size, world.local_rank) == (int(os.environ["RANK"]), 2, int(os.environ["RANK"]))
    assert world.backend == ("phalanx" if sys.platform == "linux" else "gloo")
    assert px.init() == world
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total)
    assert total.item() == 2
    px.shutdown()
    px.shutdown()
    assert not dist.is_initialized()


class Lingering:
    """Takes a while to go, in whichever thread that is."""

    def __del__(self) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < 0.003:
            pass


@pytest.mark.parametrize("attempt", range(4))
@ranks(2)
def test_a_groups_own_thread_may_be_slow_to_let_go_of_it(attempt: int) -> None:
    """Gloo's thread calls what waits for a collective, and holds it a little longer than the waiter waits."""

    def whole(future: torch.futures.Future, group: object = dist.group.WORLD, slow: object = Lingering()) -> object:
        return future.value()[0]

    sys.setswitchinterval(1e-4)
    work = dist.all_reduce(torch.ones(4), async_op=True)
    future = work.get_future().then(whole)
    del whole, work
    future.wait()
    del future
    px.shutdown()  # with destroy_process_group this aborted most times
    time.sleep(0.02)  # so that a thread which is going to abort does so in the body


@ranks(1, backend=None)
def test_alone_it_is_a_world_of_one() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    world = px.init()
    assert (world.rank, world.world_size) == (0, 1)
    model = px.replicate(torch.nn.Linear(2, 1))
    model(torch.ones(3, 2)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.sum().item() == 6
    px.shutdown()


@ranks(1, backend=None)
def test_half_an_environment_is_an_error_that_says_what_is_missing() -> None:
    os.environ.pop("MASTER_PORT")
    with pytest.raises(ValueError, match="has RANK, WORLD_SIZE but not MASTER_PORT"):
        px.init()


@ranks(2, backend=None)
def test_the_backend_can_be_chosen() -> None:
    assert px.init(backend="gloo", timeout_s=20).backend == "gloo"
    px.shutdown()
