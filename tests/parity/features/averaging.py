"""Model averaging beside torch's classes, through checkpoints."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from tests.parity.features.sides import Sides
from tests.ranks.replicas import equal_on_all_ranks, mlp, plain_loss
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchPeriodic
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager as TorchHierarchical,
)
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGD

import phalanx as px

LEVELS = {2: {2: 1, 3: 2}, 3: {2: 1, 3: 3}}


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def _local_step(model: nn.Module, step: int) -> None:
    model.zero_grad()
    plain_loss(model, dist.get_rank(), step).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad


def averagers_reloaded(sides: Sides) -> None:
    """Ours goes through a checkpoint in the middle of a period; torch's, which has none, runs through."""

    def make(kind: str, ours: bool) -> Any:
        if kind == "periodic":
            return (px.PeriodicModelAverager if ours else TorchPeriodic)(3, warmup_steps=1)
        return (px.HierarchicalModelAverager if ours else TorchHierarchical)(OrderedDict(LEVELS[sides.size]), 1)

    for kind in ("periodic", "hierarchical"):
        mine, other = mlp(), mlp()
        averagers = [make(kind, True), make(kind, False)]
        alike = []
        for step in range(8):
            if step == 2:
                saved = _through_a_file({"model": mine.state_dict(), "averager": averagers[0].state_dict()})
                mine, averagers[0] = mlp(seed=5), make(kind, True)
                mine.load_state_dict(saved["model"])
                averagers[0].load_state_dict(saved["averager"])
            for model, averager in zip((mine, other), averagers, strict=True):
                _local_step(model, step)
                averager.average_parameters(model.parameters())
            for a, b in zip(mine.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b), f"{kind}, after step {step}"
            alike.append(equal_on_all_ranks(mine[0].weight))
        assert True in alike and False in alike, f"{kind}: {alike}"


def post_local_sgd_reloaded(sides: Sides) -> None:
    """The whole recipe on DDP, with either averager: both sides save and load in the middle."""
    for hierarchical in (False, True):
        start = 2

        def wrap(
            model: nn.Module, ours: bool, hierarchical: bool = hierarchical, start: int = start
        ) -> TorchPostLocalSGD:
            inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            if hierarchical:
                kind = px.HierarchicalModelAverager if ours else TorchHierarchical
                averager: Any = kind(OrderedDict(LEVELS[sides.size]), start)
            else:
                averager = (px.PeriodicModelAverager if ours else TorchPeriodic)(2, warmup_steps=start)
            return (px.PostLocalSGDOptimizer if ours else TorchPostLocalSGD)(inner, averager)

        pair = sides.pair(mlp)
        for model in pair.both():
            group = model.process_group
            state = PostLocalSGDState(group, group, start, post_local_gradient_allreduce=False)
            model.register_comm_hook(state, post_localSGD_hook)
        optimizers = [wrap(pair.ours, True), wrap(pair.theirs, False)]
        for step in range(6):
            for number, model in enumerate(pair.both()):
                optimizers[number].zero_grad()
                plain_loss(model, sides.rank, step).backward()
                optimizers[number].step()
                if step == 3:
                    saved = _through_a_file(optimizers[number].state_dict())
                    optimizers[number] = wrap(model, number == 0)
                    optimizers[number].load_state_dict(saved)
            pair.compare_state(f"after step {step}, hierarchical: {hierarchical}", **sides.close)


CHECKS = (averagers_reloaded, post_local_sgd_reloaded)
