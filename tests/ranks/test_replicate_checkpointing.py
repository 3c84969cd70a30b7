"""Activation checkpointing: reentrant (a pass within a pass) and not, nested, repeated, and broken off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, check_steps, mlp, plain_loss
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.errors import PeerFailedError
from phalanx.testing import ranks

both_kinds = pytest.mark.parametrize("reentrant", [True, False])


@both_kinds
@ranks(2)
def test_a_layer(reentrant: bool) -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        h = checkpoint(m[2], h, use_reentrant=reentrant)
        return m[4](h).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@both_kinds
@ranks(2)
def test_every_layer_so_that_no_gradient_comes_in_the_outer_pass(reentrant: bool) -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = batch(rank, step).requires_grad_()
        for layer in m:
            h = checkpoint(layer, h, use_reentrant=reentrant)
        return h.square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@both_kinds
@ranks(2)
def test_a_layer_twice(reentrant: bool) -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        h = checkpoint(m[2], h, use_reentrant=reentrant)
        h = checkpoint(m[2], h, use_reentrant=reentrant)
        return m[4](h).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@both_kinds
@ranks(2)
def test_a_layer_once_or_twice_or_thrice_changing_by_step_and_rank(reentrant: bool) -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        for _ in range([1, 1, 1, 2, 1, 3, 2, 0, 2][step % 9] if rank == step % 2 else 1):
            h = checkpoint(m[2], h, use_reentrant=reentrant)
        return m[4](h).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss, steps=18)


@both_kinds
@ranks(2)
def test_with_unused_parameters(reentrant: bool) -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        if (rank + step) % 2:
            h = checkpoint(m[2], h, use_reentrant=reentrant)
        return (h.square() if rank == 0 and step % 3 == 0 else m[4](h).square()).sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss, steps=6)


@both_kinds
@ranks(2)
def test_nested(reentrant: bool) -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        def inner(h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(checkpoint(m[2], h, use_reentrant=reentrant))

        def outer(h: torch.Tensor) -> torch.Tensor:
            return m[4](checkpoint(inner, h, use_reentrant=reentrant))

        h = m[0](batch(rank, step))
        return checkpoint(outer, h, use_reentrant=reentrant).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_one_rank_checkpoints_and_the_other_does_not() -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        h = checkpoint(m[2], h, use_reentrant=True) if rank == 0 else m[2](h)
        return m[4](h).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_two_modules_in_one_reentrant_pass() -> None:
    rank = dist.get_rank()
    first, second = px.replicate(mlp(), **SMALL), px.replicate(mlp(1), **SMALL)
    twins = (mlp(), mlp(1))

    def loss(a: nn.Module, b: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step).requires_grad_()
        return checkpoint(lambda h: a(h) * b(h), x, use_reentrant=True).square().sum()

    for step in range(3):
        first.zero_grad(), second.zero_grad()
        loss(first, second, rank, step).backward()
        for twin in twins:
            twin.zero_grad()
        (sum(loss(*twins, r, step) for r in range(2)) / 2).backward()
        for mine, theirs in zip(
            [*first.parameters(), *second.parameters()], [*twins[0].parameters(), *twins[1].parameters()], strict=True
        ):
            torch.testing.assert_close(mine.grad, theirs.grad)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.fails:
            raise ArithmeticError("this backward fails")
        return gradient, None


def failing_loss(m: nn.Sequential, x: torch.Tensor, where: str, fails: bool) -> torch.Tensor:
    def layer(h: torch.Tensor) -> torch.Tensor:
        h = m[2](h)
        return FailsInBackward.apply(h, fails) if where == "inner" else h

    h = m[0](x)
    if where in ("outer", "outer alone"):
        h = FailsInBackward.apply(h, fails)
    h = checkpoint(layer, h, use_reentrant=True)
    if where == "outer alone":  # nothing of the module's arrives in the outer pass before it fails
        return h.square().sum()
    return m[4](h).square().sum()


@pytest.mark.parametrize("where", ["inner", "outer", "outer alone"])
@pytest.mark.parametrize("keeps_graph", [True, False])
@ranks(2)
def test_a_pass_that_raises_is_given_up_on_every_rank_and_training_goes_on(where: str, keeps_graph: bool) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    kept = []
    for step in range(6):
        model.zero_grad()
        fails = step in (0, 3) and rank == 1
        loss = failing_loss(model, batch(rank, step), where, fails)
        if keeps_graph:
            kept.append(loss)
        if step in (0, 3):
            with pytest.raises(ArithmeticError if rank == 1 else PeerFailedError, match="fails" if rank else "rank 1"):
                loss.backward()
            del loss
            continue
        loss.backward()
        expected = average_gradients(reference, lambda m, r, s: failing_loss(m, batch(r, s), where, False), step)
        assert_gradients(model, expected)


class RunsAnInnerPass(torch.autograd.Function):
    """As reentrant checkpointing does, but for a failure after the inner pass, before the node is done."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module, fails: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.fails = layer, fails
        return layer(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.layer(x), gradient)
        if ctx.fails:
            raise ArithmeticError("this backward fails after its inner pass")
        return x.grad, None, None


@ranks(2)
def test_a_pass_that_raises_between_an_inner_pass_and_the_end_of_its_node_is_not_mixed_with_the_next() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = []  # with its graph: nothing is freed that could tell that the pass is over

    for step in range(14):
        model.zero_grad()
        if step in (1, 8):  # one by one, and in runs
            assert step == 1 or replica_of(model).reducer.arrivals.roll is not None
            hidden = RunsAnInnerPass.apply(
                model[0](batch(rank, step)), model[2], rank == 1
            )  # ours arrive within it first
            kept.append(hidden)
            with pytest.raises(ArithmeticError if rank else PeerFailedError, match="inner pass" if rank else "rank 1"):
                hidden.sum().backward()
            continue
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))
    optimizer.step()


@ranks(2)
def test_the_recomputation_raises_on_one_rank() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    calls = []

    def layer(h: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2 and rank == 1:
            raise ArithmeticError("this recomputation fails")
        return model[2](h)

    h = checkpoint(layer, model[0](batch(rank)), use_reentrant=True)
    with pytest.raises(ArithmeticError if rank == 1 else PeerFailedError):
        model[4](h).square().sum().backward()
    check_steps(model, reference, plain_loss)


@ranks(2)
def test_an_optimizer_that_steps_after_a_broken_pass_gives_it_up() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss = failing_loss(model, batch(rank), "outer alone", rank == 1)
    if rank == 1:
        with pytest.raises(ArithmeticError):
            loss.backward()  # `loss` keeps the graph: nothing but the optimizer can tell that this pass is over
        optimizer.step()
    else:
        with pytest.raises(PeerFailedError):
            loss.backward()
    check_steps(model, reference, plain_loss)
