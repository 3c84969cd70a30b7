"""A step that was dropped leaves nothing behind: what it had set aside must not turn up in the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.errors import PeerFailedError
from phalanx.testing import ranks


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4)) for _ in range(3))


def drop(loss: torch.Tensor) -> None:
    """Rank 1's pass breaks off, and the others are told."""
    with pytest.raises(ValueError if dist.get_rank() == 1 else PeerFailedError):
        loss.backward()


@pytest.mark.parametrize("num_steps", [1, 5])  # before and after gradients are looked at in runs
@ranks(2)
def test_a_late_gradient_of_a_dropped_step_is_gone(num_steps: int) -> None:
    model = px.replicate(Net(), bucket_bytes=16, first_bucket_bytes=16)  # a bucket each

    def loss(*, twice: bool = False, breaks: bool = False) -> torch.Tensor:
        model.zero_grad()
        y = torch.ones(4, requires_grad=True) * model.c
        y = checkpoint(lambda t: t * model.b, y, use_reentrant=True) if twice else y
        y = y * model.a
        y = Breaks.apply(y) if breaks else y
        return (checkpoint(lambda t: t * model.b, y, use_reentrant=True) if twice else y * model.b).sum()

    for _ in range(num_steps):
        loss().backward()
    drop(loss(twice=dist.get_rank() == 0, breaks=dist.get_rank() == 1))
    loss().backward()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.ones(4)), parameter.grad


@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("kind", ["replicate", "ddp"])
@ranks(2)
def test_an_old_gradient_of_a_dropped_step_does_not_come_back(kind: str, num_steps: int) -> None:
    net = Net()
    model = px.replicate(net) if kind == "replicate" else px.DistributedDataParallel(net, find_unused_parameters=True)
    if kind == "ddp":
        net.forward = lambda uses_b, breaks: loss(uses_b, breaks)  # type: ignore[method-assign]

    def loss(uses_b: bool, breaks: bool) -> torch.Tensor:
        y = torch.ones(4, requires_grad=True) * net.a
        y = Breaks.apply(y) if breaks else y
        return (y * net.c * net.b if uses_b else y * net.c).sum()

    run = model if kind == "ddp" else loss
    for _ in range(num_steps):
        model.zero_grad()
        run(True, False).backward()
    drop(run(False, dist.get_rank() == 1))  # b still has its gradient of the step before
    model.zero_grad()
    run(False, False).backward()
    assert net.b.grad is None
    assert net.a.grad is not None and net.c.grad is not None
