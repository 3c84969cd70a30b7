"""`px.weight`: each rank counts by its share of the samples, so that uneven batches give what one process would."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, gradients, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.errors import ReducerStateError
from phalanx.testing import ranks


@ranks(3)
def test_uneven_batches_equal_one_process_on_their_union() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp().double(), **SMALL), mlp().double()
    for step in range(4):
        sizes = [5, 1 + step, 0 if step == 2 else 9]
        batches = [batch(r, step, size=max(n, 1)).double()[:n] for r, n in enumerate(sizes)]
        model.zero_grad()
        px.weight(model, sizes[rank])
        mine = model(batches[rank]).square()
        (mine.mean() if sizes[rank] else mine.sum()).backward()
        reference.zero_grad()
        reference(torch.cat(batches)).square().mean().backward()
        assert_gradients(model, gradients(reference), rtol=1e-12, atol=1e-12)


@ranks(2)
def test_a_weight_is_for_one_step() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(4):
        model.zero_grad()
        weights = [1.0, 4.0] if step % 2 == 0 else None
        if weights:
            px.weight(model, weights[rank])
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step, weights=weights))


@ranks(2)
def test_with_a_gradient_that_comes_after_its_bucket_left() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()

    def loss(m: nn.Sequential, r: int, s: int) -> torch.Tensor:
        h = m[0](batch(r, s))
        return (m[4](m[2](h)) if s > 2 else m[2](h)).square().sum()

    for step in range(5):
        model.zero_grad()
        px.weight(model, [2.0, 6.0][rank])
        loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, loss, step, weights=[2.0, 6.0]))


@ranks(2)
def test_sparse_gradients_are_weighted_too() -> None:
    rank = dist.get_rank()

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))

    model, reference = px.replicate(net()), net()
    loss = lambda m, r, s: m(torch.arange(4) + r).square().sum()
    px.weight(model, [1.0, 3.0][rank])
    loss(model, rank, 0).backward()
    expected = average_gradients(reference, loss, 0, weights=[1.0, 3.0])
    torch.testing.assert_close(model[0].weight.grad.to_dense(), expected["0.weight"].to_dense())


@ranks(2)
def test_large_weights_of_half_precision_models_do_not_overflow() -> None:
    model = px.replicate(nn.Linear(4, 1, bias=False).half())
    for value in (0.125, 3.0, 100.0):  # the first such step finds out how large weights are
        model.zero_grad()
        px.weight(model, 60_000.0)
        model(torch.full((4,), value).half()).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((1, 4), value).half())


@ranks(2)
def test_a_weight_on_one_rank_alone_is_an_error_on_all_and_training_goes_on() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    if rank == 1:
        px.weight(model, 3.0)
    with pytest.raises(ReducerStateError, match=r"ranks \[1\] gave a weight"):
        plain_loss(model, rank, 0).backward()
    model.zero_grad()
    plain_loss(model, rank, 1).backward()
    assert_gradients(model, average_gradients(reference, plain_loss, 1))


@ranks(2)
def test_weights_that_are_all_zero_are_an_error_on_all() -> None:
    model = px.replicate(mlp(), **SMALL)
    px.weight(model, 0)
    with pytest.raises(ReducerStateError, match="add up to 0"):
        plain_loss(model, dist.get_rank(), 0).backward()


@pytest.mark.parametrize("value", [-1.0, float("nan")])
@ranks(1)
def test_a_weight_that_is_none(value: float) -> None:
    model = px.replicate(mlp())
    with pytest.raises(ValueError, match="not negative"):
        px.weight(model, value)
