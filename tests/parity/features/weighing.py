"""Exact averages: `px.weight` beside one process on the union."""

from __future__ import annotations

import torch
from tests.parity.features.sides import Sides
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, gradients, mlp
from torch import nn

import phalanx as px

WEIGHTS = [2.0, 6.0, 0.5]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def uneven_batches(sides: Sides) -> None:
    """Both faces; in one step a rank has no sample at all."""
    for face in ("replicate", "ddp"):
        alone, net = mlp().double(), mlp().double()
        model = sides.mine(net) if face == "ddp" else px.replicate(net, process_group=sides.ours, **SMALL)
        for step in range(4):
            sizes = [5, 0 if step == 2 else 9, 1 + step][: sides.size]
            parts = [batch(rank, step, size=max(n, 1)).double()[:n] for rank, n in enumerate(sizes)]
            model.zero_grad()
            px.weight(model, sizes[sides.rank])
            mine = model(parts[sides.rank]).square()
            (mine.mean() if sizes[sides.rank] else mine.sum()).backward()
            alone.zero_grad()
            alone(torch.cat(parts)).square().mean().backward()
            assert_gradients(net, gradients(alone), **EXACT)


def sums_of_tokens(sides: Sides) -> None:
    """The loss is a sum over tokens that a mask leaves, so that ranks count by tokens, not by samples."""
    alone, model = mlp().double(), px.replicate(mlp().double(), process_group=sides.ours, **SMALL)
    for step in range(3):
        parts = [batch(rank, step).double() for rank in range(sides.size)]
        masks = [torch.rand(5, 2, generator=torch.Generator().manual_seed(rank)) < 0.6 for rank in range(sides.size)]
        model.zero_grad()
        px.weight(model, int(masks[sides.rank].sum()), reduction="sum")
        model(parts[sides.rank]).square()[masks[sides.rank]].sum().backward()
        alone.zero_grad()
        alone(torch.cat(parts)).square()[torch.cat(masks)].mean().backward()
        assert_gradients(model, gradients(alone), **EXACT)


def late_gradients(sides: Sides) -> None:
    """From the fourth step on the last layer is used again, after its bucket was taken to be complete."""

    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        hidden = m[2](torch.tanh(m[0](batch(rank, step).double())))
        return (m[4](hidden) if step > 2 else hidden).square().sum()

    alone, model = mlp().double(), px.replicate(mlp().double(), process_group=sides.ours, **SMALL)
    for step in range(5):
        model.zero_grad()
        px.weight(model, WEIGHTS[sides.rank])
        loss(model, sides.rank, step).backward()
        expected = average_gradients(alone, loss, step, weights=WEIGHTS[: sides.size])
        assert_gradients(model, expected, rtol=1e-10, atol=1e-10)


def sparse_gradients(sides: Sides) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2)).double()

    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(torch.arange(4) + rank + step).square().sum()

    alone, model = net(), px.replicate(net(), process_group=sides.ours)
    for step in range(2):
        model.zero_grad()
        px.weight(model, WEIGHTS[sides.rank])
        loss(model, sides.rank, step).backward()
        expected = average_gradients(alone, loss, step, weights=WEIGHTS[: sides.size])
        for mine, wanted in zip(model.parameters(), expected.values(), strict=True):
            assert mine.grad.is_sparse == wanted.is_sparse
            torch.testing.assert_close(mine.grad.to_dense(), wanted.to_dense(), rtol=1e-10, atol=1e-10)


CHECKS = (uneven_batches, sums_of_tokens, late_gradients, sparse_gradients)
