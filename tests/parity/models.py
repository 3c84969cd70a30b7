"""Five models on which Phalanx, torch's DDP and one process must agree, and a way to train them.

`wrap` says how a model becomes data-parallel; a test of another face (a DistributedDataParallel, say) adds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 20
BATCH = 6

Wrap = Callable[[nn.Module], nn.Module]


class Transformer(nn.Module):
    """Two layers; the embedding and the output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


class Mlp(nn.Sequential):
    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return super().forward(x)


class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor, rank: int) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)).mean(1))


class Branches(nn.Module):
    """Each rank leaves out a branch of its own, and one branch is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        used = [branch(h) for number, branch in enumerate(self.branches[:3]) if number != rank]
        return self.head(torch.tanh(torch.stack(used).sum(0)))


@dataclass(frozen=True)
class Case:
    """A model, its data by rank and step, and its optimizer."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], torch.Tensor]
    classes: int
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    unused: bool = False
    """Whether torch's DDP must be told to look for unused parameters."""

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        return self.build().to(dtype)

    def loss(self, model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
        """That rank's loss in that step; `model` may be wrapped."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = self.inputs(generator)
        x = x.to(dtype) if x.is_floating_point() else x
        out = model(x, rank)
        out = out.reshape(-1, out.shape[-1])
        target = torch.randint(0, self.classes, (out.shape[0],), generator=generator)
        return F.cross_entropy(out, target)


def _convolutional() -> nn.Module:
    first = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    return Mlp(*first, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5))


CASES: dict[str, Case] = {
    "mlp": Case(
        lambda: Mlp(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)),
        lambda g: torch.randn(BATCH, 7, generator=g),
        5,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    ),
    "conv_batchnorm": Case(
        _convolutional,
        lambda g: torch.randn(BATCH, 3, 8, 8, generator=g),
        5,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    ),
    "transformer_tied": Case(
        Transformer,
        lambda g: torch.randint(0, 17, (BATCH, 5), generator=g),
        17,
        # Adam divides by the root of a mean square: where that is all but zero, it makes large steps of rounding.
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3),
    ),
    "sparse_embedding": Case(
        SparseEmbedding,
        lambda g: torch.randint(0, 50, (BATCH, 4), generator=g),
        5,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    ),
    "unused_branches": Case(
        Branches,
        lambda g: torch.randn(BATCH, 7, generator=g),
        5,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
        unused=True,
    ),
}


def train(case: Case, wrap: Wrap, rank: int, dtype: torch.dtype, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """This rank's part in data-parallel training; returns the plain model's parameters and buffers."""
    model = case.model(dtype)
    wrapped = wrap(model)
    optimizer = case.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        case.loss(wrapped, rank, step, dtype).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_alone(case: Case, world_size: int, dtype: torch.dtype, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The same in one process: each rank's shard by itself, gradients averaged.

    Running shards separately is what batch normalisation needs (statistics are those of a shard); for the others it
    equals one pass over the union. Running statistics follow rank 0's shard, as rank 0's buffers are everyone's.
    """
    model = case.model(dtype)
    optimizer = case.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        state = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after: dict[str, torch.Tensor] = {}
        for rank in range(world_size):
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])
            (case.loss(model, rank, step, dtype) / world_size).backward()
            if rank == 0:
                after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def relative_error(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest, over all tensors of `mine`, of the norm of the difference relative to the norm."""
    assert mine and mine.keys() <= theirs.keys()
    errors = [
        ((mine[name] - theirs[name]).double().norm() / theirs[name].double().norm().clamp_min(1e-12)).item()
        for name in mine
    ]
    return max(errors)
