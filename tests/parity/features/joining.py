"""Uneven inputs: `join` and torch's `Join` beside torch's class, `px.join` beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.parity.features.normalising import converted_net, images, plain_net
from tests.parity.features.sides import Sides, assert_all_close, sgd
from tests.ranks.pairs import BatchNormNet, Pair, image_loss, square_loss
from tests.ranks.replicas import SMALL, mlp
from tests.ranks.uneven import CLOSE, assert_same_state, shares, train_alone
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import phalanx as px

COUNTS = {2: [1, 3], 3: [3, 0, 2]}
BY_ACTIVE = {"divide_by_initial_world_size": False}


def _train(
    sides: Sides, model: Any, join: dict[str, Any], loss: Any = square_loss, *, set_to_none: bool = True
) -> None:
    optimizer = sgd(model)
    with model.join(**join):
        for number in range(COUNTS[sides.size][sides.rank]):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(model, sides.rank, number).backward()
            optimizer.step()


def ddp_join(sides: Sides) -> None:
    cases: list[tuple[Callable[[], nn.Module], Any, dict[str, Any], dict[str, Any], bool]] = [
        (mlp, square_loss, {}, {}, True),
        (mlp, square_loss, {}, BY_ACTIVE, True),
        (mlp, square_loss, {"static_graph": True}, BY_ACTIVE, True),
        (mlp, square_loss, {"gradient_as_bucket_view": True}, {}, False),
        (BatchNormNet, image_loss, {"broadcast_buffers": False}, {}, True),
    ]
    for make, loss, options, join, set_to_none in cases:
        # Torch's static graph aborts when a rank shadows the first step; without it the numbers are the same.
        plain = {name: value for name, value in options.items() if name != "static_graph"}
        pair = Pair(sides.mine(make(), **options), sides.other(make(), **plain))
        for model in pair.both():
            _train(sides, model, join, loss, set_to_none=set_to_none)
        pair.compare_state(f"with {options} and {join}", **sides.close)


def ddp_join_with_a_hook(sides: Sides) -> None:
    for hook, join in ((default_hooks.allreduce_hook, BY_ACTIVE), (default_hooks.fp16_compress_hook, {})):
        pair = sides.pair(mlp)
        for model in pair.both():
            model.register_comm_hook(model.process_group, hook)
            _train(sides, model, join)
        pair.compare_state(
            f"with {hook.__name__}", **({"rtol": 1e-2, "atol": 1e-3} if sides.size == 3 else sides.close)
        )


def ddp_join_that_throws(sides: Sides) -> None:
    counts = {2: [2, 4], 3: [4, 2, 3]}[sides.size]
    pair = sides.pair(BatchNormNet)
    for model in pair.both():
        optimizer, done = sgd(model), []

        def train(model: Any = model, optimizer: torch.optim.Optimizer = optimizer, done: list[int] = done) -> None:
            with model.join(throw_on_early_termination=True):
                for number in range(counts[sides.rank]):
                    optimizer.zero_grad()
                    image_loss(model, sides.rank, number).backward()
                    optimizer.step()
                    done.append(number)

        first = counts[sides.rank] == min(counts)
        with pytest.raises(RuntimeError, match="exhausted all inputs" if first else "one rank that exhausted inputs"):
            train()
        assert len(done) == min(counts)
    pair.compare_state(**sides.close)


def ddp_join_with_zero(sides: Sides) -> None:
    results = []
    for group, wrap in ((sides.ours, sides.mine), (sides.theirs, sides.other)):
        model = wrap(mlp())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, lr=0.05, momentum=0.9
        )
        with Join([model, optimizer], **BY_ACTIVE):
            for number in range(COUNTS[sides.size][sides.rank]):
                square_loss(model, sides.rank, number).backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(list(model.state_dict().values()))
    assert_all_close(*results, "ZeRO under Join", **sides.close)
    assert any(not torch.equal(value, start) for value, start in zip(results[0], mlp().parameters(), strict=True))


def _alone_on_images(steps: int, size: int) -> nn.Module:
    alone = plain_net()
    optimizer = sgd(alone)
    for step in range(steps):
        optimizer.zero_grad()
        alone(torch.cat([images(rank, step) for rank in range(size)])).square().mean().backward()
        optimizer.step()
    return alone


def px_join_around_sync_batch_norm(sides: Sides) -> None:
    counts = {2: [2, 3], 3: [3, 2, 4]}[sides.size]
    model = px.replicate(converted_net(), process_group=sides.ours)
    optimizer = sgd(model)
    mine = [images(sides.rank, step) for step in range(counts[sides.rank])]
    for batch in px.join(model, optimizer, when_out="stop").over(mine):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert_same_state(model, _alone_on_images(min(counts), sides.size), **CLOSE)


def px_join_around_a_loop(sides: Sides) -> None:
    """The `with` form, plain and with a communication hook."""
    data = shares(COUNTS[sides.size])
    expected = train_alone(mlp().double(), data, sgd)
    for hook in (None, default_hooks.allreduce_hook):
        model = px.replicate(mlp().double(), process_group=sides.ours, **SMALL)
        if hook is not None:
            px.register_hook(model, hook, state=sides.theirs)
        optimizer = sgd(model)
        with px.join(model, optimizer):
            for batch in data[sides.rank]:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        assert_same_state(model, expected, **CLOSE)


def px_join_of_two_modules(sides: Sides) -> None:
    """The second steps twice a batch, before the first."""

    def train(first: nn.Module, second: nn.Module, batches: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for batch in batches:
            for _ in range(2):
                optimizers[1].zero_grad()
                second(first(batch).detach().repeat(1, 3)).square().mean().backward()
                optimizers[1].step()
            optimizers[0].zero_grad()
            first(batch).square().mean().backward()
            optimizers[0].step()

    data = shares(COUNTS[sides.size])
    first, second = (px.replicate(mlp(seed).double(), process_group=sides.ours) for seed in (0, 1))
    optimizers = sgd(first), sgd(second)
    train(first, second, px.join(first, second, *optimizers).over(data[sides.rank]), optimizers)
    alone = mlp(0).double(), mlp(1).double()
    unions = [torch.cat([share[n] for share in data if n < len(share)]) for n in range(max(COUNTS[sides.size]))]
    train(*alone, unions, [sgd(model) for model in alone])
    assert_same_state(first, alone[0], **CLOSE)
    assert_same_state(second, alone[1], **CLOSE)


class _Counted(nn.Module):
    """A layer with a buffer that tells whose batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp().double()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.sum().detach()
        return self.layer(x)


def px_join_and_buffers(sides: Sides) -> None:
    counts = COUNTS[sides.size]
    data = shares(counts)
    for policy in ("rank0", "mean"):
        model = px.replicate(_Counted(), process_group=sides.ours, buffers=policy)
        for batch in px.join(model).over(data[sides.rank]):
            model.zero_grad()
            model(batch).square().mean().backward()
        seen = 0.0
        for step in range(max(counts)):
            after = [seen + share[step].sum().item() for share in data if step < len(share)]
            seen = sum(after) / len(after) if policy == "mean" else after[0]
        torch.testing.assert_close(model.seen, torch.tensor([seen], dtype=torch.float64), **CLOSE)


CHECKS = (
    ddp_join,
    ddp_join_with_a_hook,
    ddp_join_that_throws,
    ddp_join_with_zero,
    px_join_around_sync_batch_norm,
    px_join_around_a_loop,
    px_join_of_two_modules,
    px_join_and_buffers,
)
