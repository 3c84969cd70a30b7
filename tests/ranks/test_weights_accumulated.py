"""`px.weight` over several passes: what a step adds up equals one process on the union of all micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, gradients, mlp
from tests.ranks.uneven import CLOSE, sized_shares
from torch import nn

import phalanx as px
from phalanx.testing import ranks, run_ranks

SIZES = [[3, 1, 6], [2, 2, 5], [4, 0, 1]]
WORLDS = pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (2, "phalanx"), (3, "gloo"), (3, "phalanx")])


def _union(data: list[list[torch.Tensor]]) -> dict[str, torch.Tensor | None]:
    alone = mlp().double()
    alone(torch.cat([batch for share in data for batch in share])).square().mean(1).mean().backward()
    return gradients(alone)


def _loss(model: nn.Module, batch: torch.Tensor, reduction: str) -> torch.Tensor:
    per_sample = model(batch).square().mean(1)
    return per_sample.mean() if reduction == "mean" and len(batch) else per_sample.sum()


@WORLDS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_micro_batches_of_different_sizes(reduction: str, world_size: int, backend: str) -> None:
    run_ranks(_accumulates, world_size, reduction, backend=backend)


def _accumulates(reduction: str) -> None:
    data = sized_shares(SIZES[: dist.get_world_size()])
    expected = _union(data)
    for kind in ("accumulate", "no_sync", "ddp", "ddp views"):
        model: nn.Module
        if kind.startswith("ddp"):
            model = px.DistributedDataParallel(mlp().double(), gradient_as_bucket_view=kind == "ddp views")
        else:
            model = px.replicate(mlp().double(), **SMALL)
        for _ in range(2):  # the second time with buckets as they were re-planned, and a unit that was learnt
            model.zero_grad(set_to_none=kind != "ddp views")
            _one_step(model, data[dist.get_rank()], reduction, kind)
            inner = model.module if isinstance(model, px.DistributedDataParallel) else model
            assert_gradients(inner, expected, **CLOSE)


def _one_step(model: nn.Module, batches: list[torch.Tensor], reduction: str, kind: str) -> None:
    def backward(batch: torch.Tensor) -> None:
        px.weight(model, len(batch), reduction=reduction)
        _loss(model, batch, reduction).backward()

    if kind == "accumulate":
        with px.accumulate(model, len(batches)):
            for batch in batches:
                backward(batch)
        return
    with px.no_sync(model) if kind == "no_sync" else model.no_sync():
        for batch in batches[:-1]:
            backward(batch)
    backward(batches[-1])


@ranks(2)
def test_tokens_and_fractions_count_too() -> None:
    """Weights are in any unit: here the tokens that a mask leaves, and fractions of them."""
    rank = dist.get_rank()
    tokens = [12345.0, 0.5]
    model, alone = px.replicate(mlp().double(), **SMALL), mlp().double()
    data = sized_shares([[3], [4]])
    px.weight(model, torch.tensor(tokens[rank]))
    model(data[rank][0]).square().mean().backward()
    for share, weight in zip(data, tokens, strict=True):
        (alone(share[0]).square().mean() * weight / sum(tokens)).backward()
    assert_gradients(model, gradients(alone), rtol=1e-7, atol=1e-9)


@ranks(2)
def test_once_for_a_step_whose_gradients_are_scaled_already() -> None:
    rank = dist.get_rank()
    data = sized_shares([[2, 2], [3, 3]])
    model = px.replicate(mlp().double(), **SMALL)
    with px.accumulate(model, 2):
        for batch in data[rank]:
            if batch is data[rank][-1]:
                px.weight(model, sum(map(len, data[rank])))
            _loss(model, batch, "mean").div(2).backward()
    assert_gradients(model, _union(data), **CLOSE)


@ranks(2)
def test_a_gradient_that_comes_after_its_bucket_left() -> None:
    """The second round, too, knows the weight of a sum."""
    rank = dist.get_rank()
    model = px.replicate(mlp().double(), **SMALL)
    sizes = [2, 5]
    data = sized_shares([[n] for n in sizes])
    for step in range(4):
        model.zero_grad()
        alone = mlp().double()
        loss = lambda m, x, step=step: (m[4](m[2](m[0](x))) if step > 1 else m[2](m[0](x))).square().sum()
        px.weight(model, sizes[rank], reduction="sum")
        loss(model, data[rank][0]).backward()
        (sum(loss(alone, share[0]) for share in data) / sum(sizes)).backward()
        assert_gradients(model, gradients(alone), **CLOSE)


@ranks(1)
def test_bad_weights() -> None:
    model = px.replicate(mlp().double())
    with pytest.raises(ValueError, match="not infinite; got inf"):
        px.weight(model, float("inf"))
    with pytest.raises(ValueError, match="reduction must be mean or sum"):
        px.weight(model, 3, reduction="none")  # type: ignore[arg-type]
    px.weight(model, 3)
    with pytest.raises(ValueError, match="of a mean, and now of a sum"):
        px.weight(model, 3, reduction="sum")
