"""A small transformer, tensor-parallel where it is given an axis to be so over, and its training in one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCABULARY, DIM, HEADS, LENGTH, BATCH = 11, 16, 4, 6, 8
KEEPS = "DTensor's caches keep meshes, and with them their process groups"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )  # of the heads that are here
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    **{f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")},
    **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
}


def grid(dp: int, tp: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel_transformer(mesh: DeviceMesh) -> Transformer:
    model = Transformer()
    parallelize_module(model, mesh["tp"], PLAN)
    return model


def mlp_over(mesh: DeviceMesh | None, seed: int = 0) -> nn.Sequential:
    """A column-wise and a row-wise layer, where there is a mesh, and a plain one, which `seed` is of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    if mesh is not None:
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(seed)
    model[4].reset_parameters()
    return model


def tokens_of(step: int) -> torch.Tensor:
    """The global batch of a step."""
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


def alone(num_steps: int) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and parameters of each step in one process."""
    model = Transformer()
    optimizer = optimizer_of(model)
    for step in range(num_steps):
        loss = loss_of(model, tokens_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item(), {name: p.detach().clone() for name, p in model.named_parameters()}
