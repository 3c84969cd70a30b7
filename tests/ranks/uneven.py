"""What the tests of joining share: uneven shares of data, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

Batch = torch.Tensor


def shares(counts: Sequence[int], *, size: int = 3, width: int = 6) -> list[list[Batch]]:
    """By rank its batches, in double precision; `counts` says how many."""
    made = []
    for rank, count in enumerate(counts):
        generator = torch.Generator().manual_seed(7 + rank)
        made.append([torch.randn(size, width, generator=generator).double() for _ in range(count)])
    return made


def sized_shares(sizes: Sequence[Sequence[int]], *, width: int = 6) -> list[list[Batch]]:
    """By rank its batches of the sizes given."""
    made = []
    for rank, row in enumerate(sizes):
        generator = torch.Generator().manual_seed(7 + rank)
        made.append([torch.randn(n, width, generator=generator).double() for n in row])
    return made


def train_alone(
    model: nn.Module,
    data: Sequence[Sequence[Batch]],
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    per: int = 1,
) -> nn.Module:
    """One process on the union of each step's batches; a step takes `per` batches of each rank."""
    optimizer = make(model)
    for start in range(0, max(map(len, data)), per):
        union = torch.cat([batch for share in data for batch in share[start : start + per]])
        optimizer.zero_grad()
        model(union).square().mean().backward()
        optimizer.step()
    return model


def assert_same_state(model: nn.Module, reference: nn.Module, **close: float) -> None:
    expected = reference.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, name=name: f"{name}: {text}", **close)


CLOSE = {"rtol": 1e-10, "atol": 1e-10}
