"""Mixed precision: `_MixedPrecision` beside torch's class, `px.Precision` beside casts by hand in one process."""

from __future__ import annotations

from functools import partial

import torch
from tests.parity.features.sides import Sides, assert_all_close, sgd
from tests.ranks.pairs import square_loss
from tests.ranks.precise import (
    BF16,
    Normed,
    averaged_on_wire,
    lowered_gradients,
    squares,
    torchs_class_on_the_cpu,
)
from tests.ranks.replicas import SMALL, batch, equal_on_all_ranks
from torch import nn
from torch.nn.functional import layer_norm, linear
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import phalanx as px


class _Offset(Normed):
    """A buffer that differs between ranks at first, and that every forward changes, on each rank by another step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.register_buffer("offset", torch.full((6,), 0.3 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offset += 1 + self.rank
        return super().forward(x + self.offset)


def _low_close(sides: Sides) -> dict[str, float]:
    return sides.close if sides.size == 2 else {"rtol": 2e-2, "atol": 2e-3}


def buffers_as_with_torch(sides: Sides) -> None:
    """Cast for good, and rank 0's are copied at the beginning of each forward."""
    config = _MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    with torchs_class_on_the_cpu():
        pair = sides.pair(partial(_Offset, sides.rank), mixed_precision=config)
        for step in range(3):
            for model in pair.both():
                model.zero_grad(set_to_none=step % 2 == 0)
                square_loss(model, sides.rank, step).backward()
            if step:  # in its first step torch's reducer reads bfloat16 out of buckets laid out for float32
                pair.compare_gradients(f"in step {step}", **_low_close(sides))
        assert pair.ours.module.offset.dtype is BF16
        assert torch.equal(pair.ours.module.offset, pair.theirs.module.offset)


class _Aside(Normed):
    """A loose parameter that is left out of it all: full precision, and local gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.aside.dtype is torch.float32 and self.scale.dtype is BF16
        return super().forward(x).float() * self.aside


def ignored_parameters(sides: Sides) -> None:
    """Beside casts by hand: torch 2.13's own class fails here ("Expected BFloat16, got Float")."""

    def make() -> nn.Module:
        module = _Aside()
        TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["aside"])
        return module

    model = sides.mine(make(), mixed_precision=_MixedPrecision(param_dtype=BF16, reduce_dtype=BF16))
    alone = _Aside()
    for step in range(3):
        model.zero_grad(set_to_none=step % 2 == 0)
        square_loss(model, sides.rank, step).backward()
        parts = [
            lowered_gradients(alone, rank, step, dtype=BF16, keep=lambda name: name == "aside")
            for rank in range(sides.size)
        ]
        for name, parameter in model.module.named_parameters():
            if name == "aside":
                torch.testing.assert_close(parameter.grad, parts[sides.rank][name], rtol=0.0, atol=0.0)
            else:
                wanted = averaged_on_wire([part[name] for part in parts], BF16)
                torch.testing.assert_close(parameter.grad, wanted, **_low_close(sides))
    assert not equal_on_all_ranks(model.module.aside.grad)


def _with_norm_kept(reference: Normed, rank: int, step: int) -> dict[str, torch.Tensor]:
    names = dict(reference.named_parameters())
    low = {name: p.to(BF16) for name, p in names.items() if not name.startswith("norm")}
    hidden = linear(batch(rank, step).to(BF16), low["first.weight"], low["first.bias"]).float()
    normed = layer_norm(hidden, (8,), names["norm.weight"], names["norm.bias"]).to(BF16)
    out = linear(torch.tanh(normed) * low["scale"], low["second.weight"], low["second.bias"])
    return dict(zip(names, torch.autograd.grad(out.float().square().mean(), list(names.values())), strict=True))


def normalisation_kept_full(sides: Sides) -> None:
    for wire in (None, BF16):
        policy = px.Precision(param_dtype=BF16, reduce_dtype=wire, keep_full=px.NORM_LAYERS)
        model = px.replicate(Normed(), process_group=sides.ours, precision=policy, **SMALL)
        reference = Normed()
        optimizers = sgd(model), sgd(reference)
        for step in range(3):
            optimizers[0].zero_grad(set_to_none=step % 2 == 0)
            squares(model, sides.rank, step).backward()
            parts = [_with_norm_kept(reference, rank, step) for rank in range(sides.size)]
            for name, parameter in reference.named_parameters():
                parameter.grad = averaged_on_wire([part[name] for part in parts], wire)
            if step == 0 and wire is None:  # nothing has been rounded differently yet
                mine, wanted = ([p.grad for p in m.parameters()] for m in (model, reference))
                assert_all_close(mine, wanted, "the first step's gradients", rtol=1e-5, atol=1e-7)
            for optimizer in optimizers:
                optimizer.step()
        what = f"reduced in {wire}"
        assert_all_close(list(model.parameters()), list(reference.parameters()), what, **_low_close(sides))


def accumulation_in_full_precision(sides: Sides) -> None:
    """Two passes, of which the first is not synchronised: their gradients are added up as float32."""
    model = px.replicate(
        Normed(),
        process_group=sides.ours,
        precision=px.Precision(param_dtype=BF16, reduce_dtype=torch.float32),
        **SMALL,
    )
    reference = Normed()
    for step in range(2):
        model.zero_grad()
        with px.no_sync(model):
            squares(model, sides.rank, 10 + step).backward()
        squares(model, sides.rank, step).backward()
        for name, parameter in model.named_parameters():
            parts = [
                sum(lowered_gradients(reference, rank, number, dtype=BF16)[name] for number in (10 + step, step))
                for rank in range(sides.size)
            ]
            torch.testing.assert_close(parameter.grad, averaged_on_wire(parts, None), rtol=1e-5, atol=1e-6)


CHECKS = (
    buffers_as_with_torch,
    ignored_parameters,
    normalisation_kept_full,
    accumulation_in_full_precision,
)
