"""`replicate` in the plain case, and what it leaves as it was."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.testing import ranks


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_gradients(model: nn.Module, losses: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The average over ranks of what each rank's loss gives alone, computed in this process."""
    model.zero_grad()
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@ranks(2)
def test_gradients_are_averaged() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp())
    reference = mlp()
    for step in range(4):
        model.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        expected = mean_gradients(reference, [reference(batch(r, step)).square().sum() for r in range(2)])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@ranks(2)
def test_reentrant_twice() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp())
    reference = mlp()

    def loss(m: nn.Sequential, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        h = m[0](x)
        if reentrant:
            h = checkpoint(m[2], h, use_reentrant=True)
            h = checkpoint(m[2], h, use_reentrant=True)
        else:
            h = m[2](m[2](h))
        return m[4](h).square().sum()

    for step in range(4):
        model.zero_grad()
        loss(model, batch(rank, step), True).backward()
        expected = mean_gradients(reference, [loss(reference, batch(r, step), False) for r in range(2)])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


@ranks(2)
def test_unused_differs_by_rank() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp())
    reference = mlp()

    def loss(m: nn.Sequential, x: torch.Tensor, skip: bool) -> torch.Tensor:
        h = m[0](x)
        return h.sum() if skip else m[2](h).square().sum()

    for step in range(6):
        model.zero_grad()
        loss(model, batch(rank, step), (rank + step) % 3 == 0).backward()
        expected = mean_gradients(reference, [loss(reference, batch(r, step), (r + step) % 3 == 0) for r in range(2)])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            if gradient is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, gradient)


@ranks(2)
def test_whole_module_unused_on_one_rank() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp())
    reference = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        if rank == 0 or step % 2:
            model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        other.zero_grad()
        losses = [reference(batch(r, step)).square().sum() if r == 0 or step % 2 else None for r in range(2)]
        (sum(loss for loss in losses if loss is not None) / 2).backward()  # type: ignore[union-attr]
        other.step()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@ranks(2)
def test_copies_are_plain_modules() -> None:
    model = px.replicate(mlp())
    model(batch(dist.get_rank())).sum().backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not px.is_replicated(twin)
        if dist.get_rank() == 0:
            twin(batch(0)).sum().backward()  # nobody else takes part, and nobody needs to
    assert list(model.state_dict()) == list(mlp().state_dict())
    assert type(model) is nn.Sequential
