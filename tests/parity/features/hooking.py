"""Communication hooks beside torch's class: built-in, by type, wrapped, on views, on what is sparse or unused, pickled."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.parity.features.sides import Sides
from tests.ranks.pairs import Branches, square_loss
from tests.ranks.replicas import batch, equal_on_all_ranks, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px

SMALL = {"bucket_cap_mb": 0.0002}


def _close(sides: Sides, *, half: bool) -> dict[str, float]:
    return {"rtol": 1e-2, "atol": 1e-3} if half and sides.size == 3 else sides.close


def built_in(sides: Sides) -> None:
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        pair = sides.pair_with_gloo(mlp, **SMALL)
        for model in pair.both():
            model._register_builtin_comm_hook(kind)
        half = kind == dist.BuiltinCommHookType.FP16_COMPRESS
        pair.train(square_loss, steps=3, **_close(sides, half=half))
        for model in pair.both():  # what came by the wire in float16 has no more digits than that
            gradient = model.module[0].weight.grad
            assert torch.equal(gradient, gradient.half().float()) == half


def by_type(sides: Sides) -> None:
    """All of the enumeration that torch's class can run on the CPU; what it refuses, ours refuses too."""
    names = ["ALLREDUCE", "FP16_COMPRESS", "POWER_SGD", "POWER_SGD_RANK2", "NOOP"]
    if dist.get_backend(sides.ours) != "gloo":  # it indexes what Gloo's all_gather does not return
        names.append("QUANTIZE_PER_TENSOR")
    for name in names:
        pair = sides.pair(mlp)
        for model in pair.both():
            np.random.seed(0)
            register_ddp_comm_hook(DDPCommHookType[name], model, model.process_group)
        pair.train(square_loss, steps=3, **_close(sides, half=name != "ALLREDUCE"))
        assert equal_on_all_ranks(pair.ours.module[0].weight) == (name != "NOOP"), name
    for model in sides.pair(mlp).both():
        with pytest.raises(TypeError, match="BF16 all reduce communication hook required CUDA"):
            register_ddp_comm_hook(DDPCommHookType.BF16_COMPRESS, model, model.process_group)


def _bfloat16(state, bucket):  # without annotations: torch takes them as text here, and refuses them
    """Under its own name torch refuses it where there is no NCCL, and so do we; Gloo and ours can do it."""
    return default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)(state, bucket)


def wrapped(sides: Sides) -> None:
    """PowerSGD that really compresses, on views and under each wrapper."""
    in_half = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    hooks = [powerSGD_hook.powerSGD_hook, in_half, _bfloat16]
    for hook in hooks:
        pair = sides.pair(mlp, gradient_as_bucket_view=True)
        for model in pair.both():
            state: Any = model.process_group
            if hook is not _bfloat16:
                state = powerSGD_hook.PowerSGDState(state, start_powerSGD_iter=2, min_compression_rate=0.5)
            model.register_comm_hook(state, hook)
        pair.train(square_loss, steps=4, **_close(sides, half=True))
        assert equal_on_all_ranks(pair.ours.module[0].weight)


def unused_parameters(sides: Sides) -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        pair = sides.pair(Branches, **options)
        for model in pair.both():
            model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
        pair.train(lambda model, rank, step: model(batch(rank, step), (0,)).square().mean(), steps=3, **sides.close)


def sparse_gradients(sides: Sides) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))

    pair = sides.pair(make)
    for model in pair.both():
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
    for step in range(2):
        for model in pair.both():
            model.zero_grad()
            model(torch.tensor([sides.rank, 5, 4 + step])).square().sum().backward()
        mine, other = ([p.grad.to_dense() for p in model.parameters()] for model in pair.both())
        for value, wanted in zip(mine, other, strict=True):
            torch.testing.assert_close(value, wanted, **sides.close)


def after_pickling(sides: Sides) -> None:
    """The hook does not travel: the copy averages, and takes a hook anew, in either class. PowerSGD's state travels."""
    copies = []
    for cls in (px.DistributedDataParallel, TorchDDP):
        model = cls(mlp())
        model.register_comm_hook(None, debugging_hooks.noop_hook)
        copies.append(pickle.loads(pickle.dumps(model)))
    for step, hooked in ((0, False), (1, True)):
        for twin in copies:
            if hooked:
                state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
                state = pickle.loads(pickle.dumps(state))
                twin.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for number in range(4):
                twin.zero_grad()
                square_loss(twin, sides.rank, 10 * step + number).backward()
        for mine, other in zip(*(twin.parameters() for twin in copies), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, **sides.close)
            assert equal_on_all_ranks(mine.grad)


CHECKS = (built_in, by_type, wrapped, unused_parameters, sparse_gradients, after_pickling)
