"""A backward pass that raised, of which the engine's thread tells a moment after the caller has the exception.

So it is on a GPU, where backward runs in a thread of the engine's. Here a callback that the engine has dropped is held on
to, and let go of in another thread when this one is about to wait for it: later than that nobody may send anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import assert_gradients, average_gradients, batch, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.reducer import grad_hooks
from phalanx.testing import ranks


class Trouble(Exception):
    """What these tests raise."""


def fail(_: object) -> None:
    raise Trouble("on purpose")


@contextmanager
def told_late() -> Iterator[list[str]]:
    """Yields in which threads a broken pass was told of, once somebody waited for it."""
    held: list[object] = []
    told: list[str] = []
    waited_for = threading.Event()
    queue, is_any_running, broke = grad_hooks._queue, grad_hooks._is_any_running, grad_hooks.BackwardPasses._broke

    def hold(end: Callable[[], None]) -> None:
        held.append(end)
        queue(end)

    def look() -> bool:
        waited_for.set()
        return is_any_running()

    def note(passes: grad_hooks.BackwardPasses, number: int) -> None:
        told.append(threading.current_thread().name)
        broke(passes, number)

    def let_go() -> None:
        waited_for.wait()
        held.clear()

    thread = threading.Thread(target=let_go, name="the engine's")
    thread.start()
    with (
        mock.patch.object(grad_hooks, "_queue", hold),
        mock.patch.object(grad_hooks, "_is_any_running", look),
        mock.patch.object(grad_hooks.BackwardPasses, "_broke", note),
    ):
        try:
            yield told
        finally:
            waited_for.set()
            thread.join()


def break_off(model: nn.Module, inner: nn.Module) -> None:
    """A pass that raises when all but the first layer have their gradients."""
    handle = inner[0].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    loss = plain_loss(model, dist.get_rank(), 0)
    handle.remove()
    with pytest.raises(Trouble):
        loss.backward()


def train_on(model: nn.Module, inner: nn.Module) -> None:
    reference = mlp()
    for step in range(1, 4):
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
        assert_gradients(inner, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_another_instance_on_the_same_group() -> None:
    """As in torch's own test_ddp_remove_autograd_hooks: what the first has to send comes before what the second does."""
    module = mlp()
    if dist.get_rank() == 0:
        break_off(px.DistributedDataParallel(module), module)
        second = px.DistributedDataParallel(module)
    else:
        with told_late() as told:
            break_off(px.DistributedDataParallel(module), module)
            assert not told
            second = px.DistributedDataParallel(module)
            assert told == ["the engine's"]
    train_on(second, module)


@ranks(2)
def test_the_next_forward() -> None:
    """It asks whether the pass before was finished, in a module without buffers: nothing else waits there."""
    module = mlp()
    model = px.DistributedDataParallel(module)
    if dist.get_rank() == 0:
        break_off(model, module)
    else:
        with told_late() as told:
            break_off(model, module)
            assert not told
            model(batch(1))
            assert told == ["the engine's"]
    train_on(model, module)


@ranks(2)
def test_buffers_of_the_next_forward() -> None:
    inner = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = px.DistributedDataParallel(inner, bucket_cap_mb=0.0001)
    x = batch(dist.get_rank(), 0)
    model(x).sum().backward()
    if dist.get_rank() == 0:
        break_off(model, inner)
        model(x).sum().backward()
    else:
        with told_late() as told:
            break_off(model, inner)
            inner[1].running_mean.add_(1.0)
            model(x).sum().backward()
            assert told == ["the engine's"]
    mine = torch.cat([parameter.grad.flatten() for parameter in inner.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both)


@pytest.mark.parametrize("by", ["an optimizer's step", "synchronize"])
@ranks(2)
def test_a_replicated_module_of_which_one_rank_takes_part_without_a_pass(by: str) -> None:
    model = px.replicate(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(2):
        optimizer.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        with pytest.raises(px.errors.PeerFailedError, match="rank 1 raised"):
            plain_loss(model, 0, 2).backward()
        plain_loss(model, 0, 3).backward()
    else:
        with told_late() as told:
            break_off(model, model)
            optimizer.step() if by == "an optimizer's step" else px.synchronize(model)
            assert told == ["the engine's"]
        if by == "an optimizer's step":
            plain_loss(model, 1, 3).backward()
    train_on(model, model)
