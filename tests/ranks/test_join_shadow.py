"""`px.join`, shadowing: ranks without data keep the others company, and the result is that of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, equal_on_all_ranks, mlp
from tests.ranks.uneven import CLOSE, assert_same_state, shares, sized_shares, train_alone

import phalanx as px
from phalanx.testing import run_ranks

COUNTS = {2: ([3, 5], [5, 2], [0, 3], [4, 0]), 3: ([3, 5, 4], [0, 0, 3], [5, 1, 5]), 4: ([2, 3, 0, 5],)}
ADAM = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_average_is_over_those_who_have_data(world_size: int, backend: str) -> None:
    run_ranks(_plain, world_size, backend=backend)


def _plain() -> None:
    rank = dist.get_rank()
    for counts in COUNTS[dist.get_world_size()]:
        data = shares(counts)
        model = px.replicate(mlp().double(), **SMALL)
        optimizer = ADAM(model)
        num_batches = 0
        for batch in px.join(model, optimizer).over(data[rank]):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            num_batches += 1
        assert num_batches == counts[rank]
        assert_same_state(model, train_alone(mlp().double(), data, ADAM), **CLOSE)
        assert all(equal_on_all_ranks(state["exp_avg"]) for state in optimizer.state.values())
        # And on from there, all together: nothing of the join is left behind.
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 6), float(rank), dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        assert all(equal_on_all_ranks(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_weights_it_is_one_process_on_the_union(world_size: int, backend: str) -> None:
    run_ranks(_weighted, world_size, backend=backend)


def _weighted() -> None:
    rank = dist.get_rank()
    sizes = [[3, 1, 4], [2, 7, 1, 8, 2], [6]][: dist.get_world_size()]
    data = sized_shares(sizes)
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = ADAM(model)
    for batch in px.join(model, optimizer).over(data[rank]):
        optimizer.zero_grad()
        px.weight(model, len(batch))
        model(batch).square().mean().backward()
        optimizer.step()
    assert_same_state(model, train_alone(mlp().double(), data, ADAM), **CLOSE)
