"""`replicate` on groups of another kind: shared memory, which averages by itself and lends its own memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, check_steps, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.errors import ReducerStateError
from phalanx.testing import ranks


@pytest.mark.parametrize("backend, averages", [("gloo", False), ("phalanx", True)])
def test_the_groups_own_backend_is_known(backend: str, averages: bool) -> None:
    @ranks(2, backend=backend)
    def body(averages: bool) -> None:
        model = px.replicate(mlp(), **SMALL)
        assert replica_of(model).group.averages == averages  # the sub-group is of the same kind, and known to be

    body(averages)


@ranks(3, backend="phalanx")
def test_unused_parameters_and_order() -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        return (m[2](h) if (rank + step) % 3 else h).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss, steps=6)


@ranks(2, backend="phalanx")
def test_weights_also_on_one_rank_alone() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(5):
        model.zero_grad()
        weights = [2.0, 6.0] if step % 2 else None
        if weights:
            px.weight(model, weights[rank])
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step, weights=weights))
        if step == 2 and rank == 1:
            px.weight(model, 3.0)
        if step == 2:
            with pytest.raises(ReducerStateError, match="gave a weight"):
                plain_loss(model, rank, step).backward()


@ranks(2, backend="phalanx")
def test_sparse_gradients() -> None:
    rank = dist.get_rank()

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))

    model, reference = px.replicate(net()), net()
    loss = lambda m, r, s: m(torch.arange(4) + r + s % 2).square().sum()
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
        expected = average_gradients(reference, loss, step)
        torch.testing.assert_close(model[0].weight.grad.to_dense(), expected["0.weight"].to_dense())
        torch.testing.assert_close(model[1].weight.grad, expected["1.weight"])


@ranks(2)
def test_a_sub_group_of_the_users_own() -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)]
    model, reference = mlp(), mlp()
    px.replicate(model, process_group=alone[rank])
    plain_loss(model, rank, 0).backward()  # nobody else takes part
    assert_gradients(model, average_gradients(reference, lambda m, r, s: plain_loss(m, rank, s), 0, size=1))
