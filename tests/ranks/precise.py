"""What the tests of mixed precision share: models, and one process that casts and averages by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.ranks.replicas import batch
from torch import nn
from torch.func import functional_call

BF16, FP16 = torch.bfloat16, torch.float16


class Normed(nn.Module):
    """Linear layers with a normalisation and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))) * self.scale)


def squares(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step)).float().square().mean()


def lowered_gradients(
    reference: nn.Module,
    rank: int,
    step: int,
    *,
    dtype: torch.dtype | None,
    keep: Callable[[str], bool] = lambda _: False,
) -> dict[str, torch.Tensor]:
    """One rank's gradients, of a forward in `dtype`, by hand: casts that autograd follows, in place of parameters."""
    names = dict(reference.named_parameters())
    casts = {name: p.to(dtype) if dtype and not keep(name) else p for name, p in names.items()}
    x = batch(rank, step)
    loss = functional_call(reference, casts, (x.to(dtype) if dtype else x,)).float().square().mean()
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


def averaged_on_wire(parts: list[torch.Tensor], wire: torch.dtype | None) -> torch.Tensor:
    """Each rank's share, cast for the way, summed in that dtype, and cast back."""
    shares = [(part / len(parts)).to(wire or part.dtype) for part in parts]
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total.to(parts[0].dtype)


def train_by_hand(
    reference: nn.Module,
    *,
    steps: int,
    dtype: torch.dtype | None,
    wire: torch.dtype | None,
    lr: float = 0.1,
    gradients: Callable[..., dict[str, torch.Tensor]] = lowered_gradients,
) -> None:
    """What all ranks together must come to, in one process."""
    optimizer = torch.optim.SGD(reference.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        parts = [gradients(reference, rank, step, dtype=dtype) for rank in range(dist.get_world_size())]
        for name, parameter in reference.named_parameters():
            parameter.grad = averaged_on_wire([part[name] for part in parts], wire)
        optimizer.step()


class _NoStream:
    """On the CPU everything is in order anyway; torch's class asks for streams and events all the same."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def record(self, *_: Any, **__: Any) -> None: ...
    def wait(self, *_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def torchs_class_on_the_cpu() -> Iterator[None]:
    with (
        mock.patch.object(torch, "Stream", _NoStream),
        mock.patch.object(torch, "Event", _NoStream),
        mock.patch.object(torch.accelerator, "current_stream", _NoStream),
    ):
        yield
