"""What the tests of `DistributedDataParallel` share: our class and torch's own, side by side in the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""From a wrapped model, a rank and a step to that rank's loss."""


@dataclass
class Pair:
    """The same model wrapped twice, each on a process group of its own."""

    ours: px.DistributedDataParallel
    theirs: TorchDDP

    @classmethod
    def of(cls, make: Callable[[], nn.Module], **options: Any) -> Pair:
        ours = px.DistributedDataParallel(make(), process_group=dist.new_group(), **options)
        theirs = TorchDDP(make(), process_group=dist.new_group(), **options)
        return cls(ours, theirs)

    def both(self) -> tuple[px.DistributedDataParallel, TorchDDP]:
        return self.ours, self.theirs

    def train(self, loss: Loss, *, steps: int = 20, lr: float = 0.05, set_to_none: bool = True, **close: float) -> None:
        """Steps of SGD with momentum on both; gradients and state are compared after each."""
        rank = dist.get_rank()
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for model in self.both()]
        for step in range(steps):
            for model, optimizer in zip(self.both(), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=set_to_none)
                loss(model, rank, step).backward()
            self.compare_gradients(f"after step {step}", **close)
            for optimizer in optimizers:
                optimizer.step()
            self.compare_state(f"after step {step}", **close)

    def compare_gradients(self, when: str = "", **close: float) -> None:
        for (name, mine), other in zip(self.ours.named_parameters(), self.theirs.parameters(), strict=True):
            if other.grad is None:
                assert mine.grad is None, f"{name} has a gradient, and torch's has none, {when}"
            else:
                assert mine.grad is not None, f"{name} has no gradient, and torch's has one, {when}"
                _compare(mine.grad, other.grad, f"the gradient of {name} {when}", **close)

    def compare_state(self, when: str = "", **close: float) -> None:
        theirs = self.theirs.state_dict()
        for name, mine in self.ours.state_dict().items():
            _compare(mine, theirs[name], f"{name} {when}", **close)


def _compare(mine: torch.Tensor, other: torch.Tensor, what: str, **close: float) -> None:
    """Bit for bit, unless a tolerance is given."""
    tolerance = close or {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(mine, other, msg=lambda text: f"{what}: {text}", **tolerance)


class BatchNormNet(nn.Module):
    """Convolutions with batch normalisation: buffers, channels, a flatten."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
        )
        self.head = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


class Branches(nn.Module):
    """A stem and two branches, of which a caller names those to use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(6, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x: torch.Tensor, use: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        return hidden.sum(1, keepdim=True) + sum(self.branches[index](hidden) for index in use)


def images(rank: int, step: int, *, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 1, 6, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def square_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    from tests.ranks.replicas import batch

    return model(batch(rank, step)).square().mean()


def image_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(images(rank, step)).square().mean()
