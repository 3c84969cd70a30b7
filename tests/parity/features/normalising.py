"""SyncBatchNorm inside wrapped models, beside one process on the concatenated batch."""

from __future__ import annotations

import torch
from tests.parity.features.sides import Sides, sgd
from tests.ranks.normalized import batch
from tests.ranks.uneven import CLOSE, assert_same_state
from torch import nn

import phalanx as px


def plain_net() -> nn.Sequential:
    torch.manual_seed(1)
    first = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def converted_net() -> nn.Module:
    return px.SyncBatchNorm.convert_sync_batchnorm(plain_net())


def images(rank: int, step: int, *, size: int = 3) -> torch.Tensor:
    return batch(rank, size, (2, 4, 4), torch.float64, step=step)


def converted_models(sides: Sides) -> None:
    """Both faces, three steps; replicate on batches of different sizes, of which one rank's is a single sample.

    With unequal batches the loss is a sum: SyncBatchNorm's backward adds up what the ranks' losses say, before weights.
    """
    sizes = {"ddp": [3, 3, 3], "replicate": [4, 1, 2]}
    for face in ("ddp", "replicate"):
        net, alone = converted_net(), plain_net()
        model = sides.mine(net) if face == "ddp" else px.replicate(net, process_group=sides.ours)
        optimizers = sgd(net), sgd(alone)
        for step in range(3):
            parts = [images(rank, step, size=sizes[face][rank]) for rank in range(sides.size)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(parts[sides.rank]).square().mean(1)
            if face == "replicate":
                px.weight(model, len(loss), reduction="sum")
            (loss.mean() if face == "ddp" else loss.sum()).backward()
            alone(torch.cat(parts)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_same_state(net, alone, **CLOSE)
        # In eval mode every rank is on its own, with the estimates that all have.
        x = images(sides.rank, 9)
        torch.testing.assert_close(model.eval()(x), alone.eval()(x), **CLOSE)


CHECKS = (converted_models,)
