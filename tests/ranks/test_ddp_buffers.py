"""Buffers: rank 0's, before each forward or not at all, and never in a way that backward could notice."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Pair, image_loss, images
from tests.ranks.replicas import batch, equal_on_all_ranks
from torch import nn

import phalanx as px
from phalanx.testing import ranks


class Counts(nn.Module):
    """A buffer that differs by rank and counts calls, and one that is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.register_buffer("calls", torch.full((1,), 100.0 * dist.get_rank()))
        self.register_buffer("flags", torch.full((3,), dist.get_rank(), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"forward_sync_buffers": True},
        {"init_sync": False},
    ],
    ids=["default", "broadcast off", "forward off", "forward on", "no init"],
)
@ranks(2)
def test_buffers_are_what_torchs_are(options: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        pair = Pair.of(Counts, **options)
    pair.compare_state("at construction")
    for step in range(3):
        for model in pair.both():
            model.zero_grad()
            model(batch(dist.get_rank(), step)).sum().backward()
        pair.compare_state(f"after step {step}")
        pair.compare_gradients(f"after step {step}")
    assert pair.ours.broadcast_buffers == pair.theirs.broadcast_buffers


@ranks(2)
def test_the_deprecated_argument_warns() -> None:
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        px.DistributedDataParallel(Counts(), broadcast_buffers=True)
    with pytest.warns(FutureWarning, match="is ignored"):
        model = px.DistributedDataParallel(Counts(), broadcast_buffers=True, forward_sync_buffers=False)
    assert model.forward_sync_buffers is False
    model.broadcast_buffers = True
    assert model.forward_sync_buffers is True


@ranks(2)
def test_two_forwards_before_one_backward() -> None:
    """The broadcast is not a change that autograd could object to, as with torch."""
    pair = Pair.of(BatchNormNet)

    def twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return image_loss(model, rank, step) + image_loss(model, rank, 50 + step)

    pair.train(twice, steps=3)


@ranks(2)
def test_replaced_buffers_are_found() -> None:
    model = px.DistributedDataParallel(Counts())
    model.module.calls = torch.full((1,), 7.0 + dist.get_rank())
    model(batch(0))
    assert model.module.calls.item() == 8.0


@ranks(2)
def test_in_eval_mode_buffers_are_broadcast_as_with_torch() -> None:
    """torch looks at the last synchronised forward, not at the mode: ranks run eval through the wrapper together."""
    pair = Pair.of(BatchNormNet)
    pair.train(image_loss, steps=2)
    outputs = []
    for model in pair.both():
        model.eval()
        with torch.no_grad():
            outputs.append(model(images(dist.get_rank(), 7)))
    assert torch.equal(*outputs)
    pair.compare_state("after eval")
    assert equal_on_all_ranks(pair.ours.module.features[1].running_mean)
