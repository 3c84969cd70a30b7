"""The models of the GPU benchmark, with torch alone: no torchvision, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GpuTask:
    """A model and what it is trained on. `loss(module)` runs forward on one batch that lies on the device."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    about: str
    bucket_view: bool = True


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3, 1 x 1, and a way around them."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(width_in, width, 1, 1),
            nn.ReLU(True),
            *_conv(width, width, 3, stride),
            nn.ReLU(True),
            *_conv(width, 4 * width, 1, 1),
        )
        plain = stride == 1 and width_in == 4 * width
        self.around = nn.Identity() if plain else nn.Sequential(*_conv(width_in, 4 * width, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.around(x))


def _conv(width_in: int, width: int, kernel: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(width)


def resnet50(batch_size: int = 64) -> GpuTask:
    """He et al.'s 50 layers: 161 parameters, 25.6 million numbers."""

    def make() -> nn.Module:
        layers: list[nn.Module] = [*_conv(3, 64, 7, 2), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
        width_in = 64
        for width, num_blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for block in range(num_blocks):
                layers.append(Bottleneck(width_in, width, stride if block == 0 else 1))
                width_in = 4 * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
        return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    images = torch.randn(batch_size, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch_size,), device="cuda")

    def loss(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(module(images), labels)

    return GpuTask(make, loss, f"ResNet-50, bf16 autocast, batch {batch_size}")


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.to_qkv(self.before_attention(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """GPT-2 small: 12 blocks of width 768, 124 million numbers, input and output tied."""

    def __init__(self, vocabulary: int = 50304, width: int = 768, num_blocks: int = 12, length: int = 512) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 12) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def gpt(batch_size: int = 8, length: int = 512) -> GpuTask:
    tokens = torch.randint(0, 50304, (batch_size, length + 1), device="cuda")

    def loss(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return GpuTask(lambda: Gpt(length=length), loss, f"GPT-2 small, bf16 autocast, batch {batch_size}, {length} tokens")


def linears(num_layers: int = 500) -> GpuTask:
    batch = torch.randn(64, 256, device="cuda")

    def loss(module: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return module(batch).square().mean()

    return GpuTask(
        lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(num_layers))),
        loss,
        f"{num_layers} linear layers of 256 x 256, bf16 autocast",
    )


class Scales(nn.Module):
    """As many small parameters as asked for, each used once."""

    def __init__(self, num_parameters: int, size: int = 64) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(num_parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def small_parameters(num_parameters: int = 5000) -> GpuTask:
    batch = torch.randn(32, 64, device="cuda")
    return GpuTask(
        lambda: Scales(num_parameters), lambda module: module(batch).mean(), f"{num_parameters} parameters of 64"
    )


TASKS: dict[str, Callable[[], GpuTask]] = {
    "resnet50": resnet50,
    "gpt": gpt,
    "linears": linears,
    "small": small_parameters,
}
