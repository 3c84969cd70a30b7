"""The models that the step benchmarks train, with a batch and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """A model and what it is trained on. `loss(module)` runs forward on this rank's batch."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    about: str


def linears() -> Task:
    """500 linear layers of 256 x 256: 1000 parameters, so that the cost per parameter shows."""
    batch = torch.randn(16, 256)

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(500)))

    return Task(make, lambda module: module(batch).square().mean(), "500 x Linear(256, 256), batch 16")


class Decoder(nn.Module):
    """About 19 million parameters: 6 layers of width 384 over a vocabulary of 20 000, input and output tied."""

    def __init__(self, vocabulary: int = 20000, width: int = 384, num_layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: torch.Tensor = self.head(self.norm(self.layers(self.embedding(tokens), mask=mask, is_causal=True)))
        return hidden


def transformer() -> Task:
    tokens = torch.randint(0, 20000, (1, 17))

    def loss(module: nn.Module) -> torch.Tensor:
        logits = module(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Task(Decoder, loss, "decoder of 19 M parameters, batch 1, 16 tokens")


def convolutions() -> Task:
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))

    def make() -> nn.Module:
        layers: list[nn.Module] = []
        channels = 3
        for width in (64, 64, 128, 128, 256, 256, 512, 512):
            stride = 2 if width != channels and channels != 3 else 1
            layers += [nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))

    return Task(make, lambda module: F.cross_entropy(module(images), labels), "8 x conv + BatchNorm, batch 8")


TASKS: dict[str, Callable[[], Task]] = {
    "linears": linears,
    "transformer": transformer,
    "convolutions": convolutions,
}
