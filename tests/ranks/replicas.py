"""What the tests of `replicate` share: small models, data by rank and step, and the average computed in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

import phalanx as px

Loss = Callable[[nn.Module, int, int], torch.Tensor | None]
"""From a model, a rank and a step to that rank's loss; None where the rank computes none."""

SMALL = {"bucket_bytes": 160, "first_bucket_bytes": 64}
"""Several buckets even for the models here."""


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank: int, step: int = 0, *, size: int = 5, width: int = 6) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(100 * step + rank))


def plain_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).square().sum()


def average_gradients(
    reference: nn.Module, loss: Loss, step: int, *, size: int | None = None, weights: Sequence[float] | None = None
) -> dict[str, torch.Tensor | None]:
    """What every rank must hold after the step: the (weighted) mean of what each rank's loss gives alone."""
    size = dist.get_world_size() if size is None else size
    shares = [w / sum(weights) for w in weights] if weights else [1 / size] * size
    reference.zero_grad()
    for rank, share in enumerate(shares):
        value = loss(reference, rank, step)
        if value is not None:
            (value * share).backward()
    return gradients(reference)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def assert_gradients(model: nn.Module, expected: dict[str, torch.Tensor | None], **tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        if wanted is None:
            assert parameter.grad is None, f"{name} has a gradient that no rank computed"
            continue
        assert parameter.grad is not None, f"{name} has no gradient"
        close = {"rtol": 1e-4, "atol": 1e-4, **tolerance}  # sums in another order; a wrong average is off by far more
        torch.testing.assert_close(parameter.grad, wanted, msg=lambda text, name=name: f"{name}: {text}", **close)


def check_steps(model: nn.Module, reference: nn.Module, loss: Loss, *, steps: int = 4) -> None:
    """Gradients equal the average: in the first step, in the re-planned second, in those that know what to expect."""
    rank = dist.get_rank()
    for step in range(steps):
        model.zero_grad()
        value = loss(model, rank, step)
        if value is not None:
            value.backward()
        else:
            px.synchronize(model)
        assert_gradients(model, average_gradients(reference, loss, step))


def equal_on_all_ranks(tensor: torch.Tensor) -> bool:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach().contiguous())
    return all(torch.equal(parts[0], part) for part in parts)


def flush_engine() -> None:
    """Run an empty backward pass: after one that raised in a hook, torch's engine holds the rest of its graph."""
    torch.zeros((), requires_grad=True).backward()
