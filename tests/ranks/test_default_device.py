"""`torch.set_default_device` is the user's, for their own tensors. Here it names one where nothing can be computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.ranks.replicas import assert_gradients, average_gradients, batch, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.testing import run_ranks


@contextmanager
def nowhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


class Table(nn.Module):
    """Sparse gradients, a layer that normalises, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.norm(self.table(tokens))
        return self.second(self.first(x)) if both else self.first(x)


def body() -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for wrap in (px.replicate, px.DistributedDataParallel):
        module, reference = mlp(), mlp()
        batches = [batch(rank, step) for step in range(6)]
        with nowhere():
            model = wrap(module)
        for step, x in enumerate(batches):
            with nowhere():
                model.zero_grad()
                if wrap is px.replicate and step % 2:
                    px.weight(model, 1.0 + rank)
                model(x).square().sum().backward()
            weights = [1.0 + r for r in range(size)] if wrap is px.replicate and step % 2 else None
            assert_gradients(module, average_gradients(reference, plain_loss, step, weights=weights))
    net, tokens, rows = Table(), torch.arange(9), torch.full((2, 3), float(rank))
    with nowhere():
        model = px.replicate(px.synchronize_batch_norm(net))
        with px.join(model):
            for step in range(2 + rank):
                model.zero_grad()
                model(tokens, both=step % 2 == 0 or rank == 0).sum().backward()
        sampler = px.DistributedSampler(range(2 * size), num_replicas=size, rank=rank)
        together = px.gather_exact(rows, indices=list(sampler))
    assert all(parameter.grad.device.type == "cpu" for parameter in net.first.parameters())
    assert sorted(together[:, 0].tolist()) == sorted(float(r) for r in range(size) for _ in range(2))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_default_device_of_the_users(backend: str) -> None:
    run_ranks(body, 2, backend=backend)
