"""Delayed and skipped reduction, static graphs and the reducer by hand, beside torch's class or one process."""

from __future__ import annotations

from typing import Any

import torch
from tests.parity.features.sides import Sides, sgd
from tests.ranks.pairs import BatchNormNet, Branches, image_loss, square_loss
from tests.ranks.replicas import average_gradients, batch, equal_on_all_ranks, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px


def _delaying(sides: Sides, module: nn.Module, names: tuple[str, ...], trigger: str) -> px.DistributedDataParallel:
    parameters = dict(module.named_parameters())
    delayed: Any = [(name, parameters[name]) for name in names]
    return sides.mine(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=parameters[trigger])


def delayed_in_other_dtypes(sides: Sides) -> None:
    """Double precision, and sparse gradients: torch's buffer is of single precision and dense."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2)).double()

    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(torch.arange(4) + rank + step % 2).square().sum()

    model, alone = _delaying(sides, net(), ("0.weight", "2.weight"), "1.weight"), net()
    for step in range(3):
        model.zero_grad()
        loss(model, sides.rank, step).backward()
        expected = average_gradients(alone, loss, step)
        for name, parameter in model.module.named_parameters():
            wanted = expected[name].to_dense()
            torch.testing.assert_close(parameter.grad.to_dense(), wanted, rtol=1e-12, atol=1e-12)


def all_delayed(sides: Sides) -> None:
    """Every parameter of a model with buffers: the same training as without a delay, with torch's class."""
    names = tuple(name for name, _ in BatchNormNet().named_parameters())
    models = _delaying(sides, BatchNormNet(), names, names[0]), sides.other(BatchNormNet())
    optimizers = [sgd(model) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            image_loss(model, sides.rank, step).backward()
            optimizer.step()
    theirs = models[1].state_dict()
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(value, theirs[name], msg=lambda text, name=name: f"{name}: {text}", **sides.close)


def removed_autograd_hooks(sides: Sides) -> None:
    pair = sides.pair(mlp)
    for model in pair.both():
        model._remove_autograd_hooks()
        model(batch(sides.rank)).square().sum().backward()
    pair.compare_gradients(rtol=0.0, atol=0.0)
    assert not equal_on_all_ranks(pair.ours.module[0].weight.grad)


def reducer_by_hand(sides: Sides) -> None:
    """As torch's pipelining does: it runs the module itself and announces the backward pass."""
    pair = sides.pair(mlp)
    for step in range(2):
        for model in pair.both():
            model.zero_grad()
            model.reducer.prepare_for_backward([])
            model.module(batch(sides.rank, step)).square().sum().backward()
            model._check_reducer_finalized()
        pair.compare_gradients(f"in step {step}", **sides.close)


class _Reuses(nn.Module):
    """The middle layer runs twice, checkpointed; another is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for reentrant in (True, False):
            h = torch.tanh(checkpoint(self.middle, h, use_reentrant=reentrant))
        return self.last(h)


def static_graph(sides: Sides) -> None:
    """Given to the constructor, and set afterwards."""
    pair = sides.pair(_Reuses, static_graph=True, gradient_as_bucket_view=True)
    pair.train(square_loss, steps=4, **sides.close)
    pair = sides.pair(_Reuses)
    for model in pair.both():
        model._set_static_graph()
    pair.train(square_loss, steps=4, **sides.close)


def skipped_unused_parameters(sides: Sides) -> None:
    """Training with momentum; the branch that nobody uses stays without a gradient."""
    flags = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.00005}
    pair = sides.pair(Branches, **flags)
    pair.train(lambda model, rank, step: model(batch(rank, step), (1,)).square().mean(), steps=4, **sides.close)
    assert pair.ours.module.branches[0].weight.grad is None


CHECKS = (
    delayed_in_other_dtypes,
    all_delayed,
    removed_autograd_hooks,
    reducer_by_hand,
    static_graph,
    skipped_unused_parameters,
)
