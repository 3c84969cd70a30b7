"""Optimizers in backward, each of the three ways, beside torch's DDP with an ordinary step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.parity.features.sides import Sides, assert_all_close
from tests.ranks.pairs import Branches
from tests.ranks.replicas import SMALL, batch, equal_on_all_ranks, mlp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import phalanx as px

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    # Adam divides by the root of a mean square: where that is all but zero, it makes large steps of rounding.
    "adam": (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}),
}


def _faces(sides: Sides) -> dict[str, Callable[[nn.Module], nn.Module]]:
    return {
        "replicate": lambda module: px.replicate(module, process_group=sides.ours, **SMALL),
        "ddp": lambda module: sides.mine(module, bucket_cap_mb=0.0002),
        "ddp, views": lambda module: sides.mine(module, gradient_as_bucket_view=True),
        "ddp, static": lambda module: sides.mine(module, static_graph=True),
    }


def _train(model: nn.Module, optimizer: Optimizer | None = None) -> list[torch.Tensor]:
    for number in range(3):
        model(batch(dist.get_rank(), number)).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            model.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _ordinary(sides: Sides, which: str) -> list[torch.Tensor]:
    """What torch's class and a step of the user's come to."""
    model = sides.other(mlp())
    cls, options = OPTIMIZERS[which]
    return _train(model, cls(model.parameters(), **options))


def per_parameter(sides: Sides) -> None:
    """`_apply_optimizer_in_backward`; the other ways are in all cells of tests/ranks/test_optimizer_in_backward.py."""
    for which, (cls, options) in OPTIMIZERS.items():
        expected = _ordinary(sides, which)
        for face, wrap in _faces(sides).items():
            module = mlp()
            _apply_optimizer_in_backward(cls, module.parameters(), options)
            assert_all_close(_train(wrap(module)), expected, f"{which}, {face}", **sides.close)


def some_parameters_only(sides: Sides) -> None:
    """The others keep their averages, for an optimizer of the user's."""
    cls, options = OPTIMIZERS["adam"]
    expected = _ordinary(sides, "adam")
    for face, wrap in _faces(sides).items():
        module = mlp()
        model = wrap(module)
        if face == "replicate":
            px.step_in_backward(model, cls(module[0].parameters(), **options))
        else:
            model._register_fused_optim(cls, optim_params=module[0].parameters(), **options)
        rest = cls([*module[2].parameters(), *module[4].parameters()], **options)
        assert_all_close(_train(model, rest), expected, face, **sides.close)


def accumulation(sides: Sides) -> None:
    """A pass under `no_sync` steps nothing; the next one steps on the average of both."""

    def run(model: nn.Module, optimizer: Optimizer | None = None) -> list[torch.Tensor]:
        for number in range(2):
            with px.no_sync(model) if px.is_replicated(model) else model.no_sync():
                model(batch(sides.rank, 10 + number)).square().mean().backward()
            model(batch(sides.rank, number)).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    cls, options = OPTIMIZERS["adamw"]
    theirs = sides.other(mlp())
    expected = run(theirs, cls(theirs.parameters(), **options))
    for face in ("replicate", "ddp", "ddp, views"):
        model = _faces(sides)[face](mlp())
        px.step_in_backward(model, cls(model.parameters(), **options))
        assert_all_close(run(model), expected, face, **sides.close)


def ignored_parameters(sides: Sides) -> None:
    """They step on this rank's own gradients, as an ordinary step on torch's class does."""
    cls, options = OPTIMIZERS["sgd"]

    def ignoring() -> nn.Module:
        module = mlp()
        px.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        return module

    theirs = sides.other(ignoring())
    expected = _train(theirs, cls(theirs.parameters(), **options))
    assert not equal_on_all_ranks(expected[0])
    for way in ("per parameter", "step_in_backward", "replicate"):
        module = mlp() if way == "replicate" else ignoring()
        if way == "per parameter":
            _apply_optimizer_in_backward(cls, module.parameters(), options)
        if way == "replicate":
            model: nn.Module = px.replicate(module, process_group=sides.ours, ignore=["0.weight"])
        else:
            model = sides.mine(module)
        if way != "per parameter":
            px.step_in_backward(model, cls(model.parameters(), **options))
        assert_all_close(_train(model), expected, way, **sides.close)


def unused_parameters(sides: Sides) -> None:
    """A branch that no rank uses any more: Adam would move it by its momentum, given a gradient of zeros."""
    cls, options = OPTIMIZERS["adam"]

    def run(model: nn.Module, optimizer: Optimizer | None = None) -> list[torch.Tensor]:
        for number in range(3):
            model(batch(sides.rank, number), use=(0, 1) if number == 0 else (0,)).square().mean().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    theirs = sides.other(Branches(), find_unused_parameters=True)
    expected = run(theirs, cls(theirs.parameters(), **options))
    for face in ("replicate", "ddp"):
        for way in ("per parameter", "step_in_backward"):
            module = Branches()
            if face == "replicate":
                model: nn.Module = px.replicate(module, process_group=sides.ours)
            else:
                model = sides.mine(module, find_unused_parameters=True)
            if way == "per parameter":
                _apply_optimizer_in_backward(cls, module.parameters(), options)
            else:
                px.step_in_backward(model, cls(model.parameters(), **options))
            assert_all_close(run(model), expected, f"{face}, {way}", **sides.close)


CHECKS = (per_parameter, some_parameters_only, accumulation, ignored_parameters, unused_parameters)
