"""Compiled autograd: the whole backward pass is one graph, and gradients arrive inside of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from tests.ranks.compiled import SMALL, Net, Recompilations, batch, graph_breaks, launches, losses_alone, train
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import phalanx as px
from phalanx import events
from phalanx.api.replica import replica_of
from phalanx.errors import PeerFailedError
from phalanx.testing import run_ranks as run_ranks_within

CAP_MB = SMALL["bucket_bytes"] / 2**20


def compiled(backend: Any = "eager") -> AbstractContextManager[None]:
    return compiled_autograd._enable(torch.compile(backend=backend))


KEPT = "torch keeps the captured backward pass with the parameters that it was captured with"
run_ranks = partial(run_ranks_within, allow_leaks=KEPT, timeout_s=110)  # to capture a pass takes seconds


def make(kind: str, net: nn.Module) -> nn.Module:
    if kind == "replicate":
        return px.replicate(net, **SMALL)
    return px.DistributedDataParallel(net, bucket_cap_mb=CAP_MB, gradient_as_bucket_view=kind == "ddp_view")


@pytest.mark.parametrize("kind", ["replicate", "ddp", "ddp_view"])
def test_gradients_are_averaged_in_one_graph(kind: str) -> None:
    run_ranks(_gradients_are_averaged_in_one_graph, 2, kind)


def _gradients_are_averaged_in_one_graph(kind: str) -> None:
    rank, net, captured = dist.get_rank(), Net(), Recompilations()
    model = make(kind, net)
    with compiled():
        losses = train(model, net, rank, after_step=captured.after_step)
    assert losses == pytest.approx(losses_alone(rank), rel=1e-5)
    assert captured.graphs == [2, 2, 2, 2]  # one capture, one graph
    assert graph_breaks() == 1  # where the step ends, with nothing behind it
    with events.recorded() as seen, compiled():
        model(batch(rank, 9)).sum().backward()
    last_gradient = max(event.at_s for event in seen if isinstance(event, events.GradientReady))
    assert launches(seen)[0] < last_gradient


@pytest.mark.parametrize("kind", ["replicate", "ddp_view"])
def test_zeroed_gradients_lie_in_buckets(kind: str) -> None:
    run_ranks(_zeroed_gradients_lie_in_buckets, 2, kind)


def _zeroed_gradients_lie_in_buckets(kind: str) -> None:
    """The graph adds to them in place, when it is over: a bucket must not have left by then."""
    rank, net = dist.get_rank(), Net()
    with compiled():
        losses = train(make(kind, net), net, rank, to_none=False)
    assert losses == pytest.approx(losses_alone(rank), rel=1e-5)


@pytest.mark.parametrize("mode", ["ddp_optimizer", "python_reducer"])
def test_with_compiled_forward(mode: str) -> None:
    run_ranks(_with_compiled_forward, 2, mode)


def _with_compiled_forward(mode: str) -> None:
    rank = dist.get_rank()
    with torch._dynamo.config.patch(optimize_ddp=mode, compiled_autograd=True):
        for kind in ("replicate", "ddp"):
            net, reference = Net(), Net()
            model = make(kind, net)
            step = torch.compile(_forward_and_backward, backend="aot_eager")
            for number in range(3):
                step(model, batch(rank, number))
                torch.stack([reference(batch(r, number)).square().mean() for r in range(2)]).mean().backward()
                for got, wanted in zip(net.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(got.grad, wanted.grad)
                net.zero_grad()
                reference.zero_grad()
            assert counters["compiled_autograd"]["captures"] > 0


def _forward_and_backward(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("kind", ["replicate", "ddp"])
def test_accumulation(kind: str) -> None:
    run_ranks(_accumulation, 2, kind)


def _accumulation(kind: str) -> None:
    rank, net, reference = dist.get_rank(), Net(), Net()
    model = make(kind, net)
    with compiled():
        for step in range(2):
            synchronised = step % 2 == 1
            block = nullcontext() if synchronised else (px.no_sync(net) if kind == "replicate" else model.no_sync())
            with block:
                model(batch(rank, step)).square().mean().backward()
            if synchronised:
                reference.zero_grad()
                each = [reference(batch(r, s)).square().mean() for s in (step - 1, step) for r in range(2)]
                (torch.stack(each).sum() / 2).backward()
                for got, wanted in zip(net.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(got.grad, wanted.grad)
                net.zero_grad()


def test_after_steps_without_it() -> None:
    run_ranks(_after_steps_without_it, 2)


def _after_steps_without_it() -> None:
    """By then most hooks are one C function, which the graph is broken for."""
    rank, net = dist.get_rank(), Net()
    model = px.replicate(net, **SMALL)

    first = train(model, net, rank, steps=4)
    again = Net()
    net.load_state_dict(again.state_dict())
    with compiled():
        losses = train(model, net, rank, steps=2)
    assert losses == pytest.approx(first[:2], rel=1e-5)
    assert losses == pytest.approx(losses_alone(rank, steps=2), rel=1e-5)


def test_unused_parameters_and_a_rank_that_raises() -> None:
    run_ranks(_unused_parameters_and_a_rank_that_raises, 2)


def _unused_parameters_and_a_rank_that_raises() -> None:
    rank, net = dist.get_rank(), Net()
    model = px.replicate(net, **SMALL)
    with compiled():
        for _ in range(2):
            model(batch(rank, 0), skip=1).sum().backward()
            assert [p.grad is None for p in net.layers[1].parameters()] == [True, True]
            assert net.layers[0].weight.grad is not None
            net.zero_grad()
        hidden = net.layers[0](batch(rank, 1))
        if rank == 1:
            hidden.register_hook(_raise)
        with pytest.raises(PeerFailedError if rank == 0 else Exception, match=r"rank 1 raised|no gradient today"):
            net.layers[1](hidden).sum().backward()
    net.zero_grad()
    net.load_state_dict(Net().state_dict())
    losses = train(model, net, rank)
    assert losses == pytest.approx(losses_alone(rank), rel=1e-5)


def _raise(_: torch.Tensor) -> None:
    raise ValueError("no gradient today")


@pytest.mark.parametrize("same_order", [True, False])
def test_after_eager_steps_that_have_shown_an_order(same_order: bool) -> None:
    run_ranks(_after_eager_steps, 2, same_order)


def _after_eager_steps(same_order: bool) -> None:
    """Hooks that only count are what the compiler finds, and calls to the end of the pass."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = px.replicate(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), **SMALL)

    def loss(of: int, order: list[int]) -> torch.Tensor:
        x = torch.full((2, 8), 1.0 + of)
        for index in order:
            x = torch.tanh(model[index](x))
        return x.square().mean()

    def step(order: list[int], context: AbstractContextManager[None] | None = None) -> None:
        total = torch.stack([loss(of, order) for of in range(size)]).mean()
        expected = torch.autograd.grad(total, list(model.parameters()))
        model.zero_grad()
        with context or nullcontext():  # around our pass alone: each one that is captured takes seconds
            loss(rank, order).backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)

    regular = [0, 1, 2, 3, 4]
    for _ in range(5):
        step(regular)
    assert replica_of(model).reducer.arrivals.roll is not None
    for order in [regular if same_order else regular[::-1]] * 2 + [regular] * 2:
        step(order, compiled())
    for _ in range(6):
        step(regular)


def test_eager_steps_in_between_do_not_have_it_compiled_again_and_again() -> None:
    run_ranks(_eager_steps_in_between, 1)


def _eager_steps_in_between() -> None:
    model = px.replicate(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    replica_of(model).reducer.communicate_alone()
    captured = Recompilations()
    for step in range(20):
        model.zero_grad()
        with compiled() if step % 4 == 3 else nullcontext():
            model(torch.ones(2, 4)).sum().backward()
        captured.after_step(step)
    assert captured.graphs[3] > captured.graphs[2]
    assert captured.graphs[-1] == captured.graphs[7]  # as it found other hooks once
