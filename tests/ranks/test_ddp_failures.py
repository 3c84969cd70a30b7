"""Exceptions in a step: the same instance trains on, the others are told, and nobody waits for long."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches
from tests.ranks.replicas import assert_gradients, average_gradients, batch, flush_engine, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.errors import PeerFailedError, PhalanxError
from phalanx.testing import ranks

OPTIONS = {
    "plain": {"bucket_cap_mb": 0.0002},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0002},
    "static": {"static_graph": True},
}


class Trouble(Exception):
    """What these tests raise."""


def fail(_: object) -> None:
    raise Trouble("on purpose")


def failing(model: nn.Module, rank: int, step: int, where: int) -> torch.Tensor:
    """A loss whose backward raises in the middle: layers behind `where` have their gradients then."""
    inner = model.module
    handle = inner[where].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    loss = plain_loss(model, rank, step)
    handle.remove()
    return loss


def train_on(model: px.DistributedDataParallel) -> None:
    reference = mlp()
    for step in range(10, 13):
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
        assert_gradients(model.module, average_gradients(reference, plain_loss, step))


@pytest.mark.parametrize("first", [False, True], ids=["later", "first step"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@ranks(2)
def test_all_ranks_raise_and_train_on(options: dict, first: bool) -> None:
    model = px.DistributedDataParallel(mlp(), **options)
    if not first:
        plain_loss(model, dist.get_rank(), 0).backward()
    for where in (0, 2, 4):
        with pytest.raises(Trouble):
            failing(model, dist.get_rank(), 1, where).backward()
    train_on(model)


@pytest.mark.parametrize("first", [False, True], ids=["later", "first step"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@ranks(3)
def test_one_rank_raises_alone_and_all_train_on(options: dict, first: bool) -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp(), **options)
    if not first:
        plain_loss(model, rank, 0).backward()
    if rank == 1:
        with pytest.raises(Trouble):
            failing(model, rank, 1, 2).backward()
    else:
        with pytest.raises(PeerFailedError, match="rank 1 raised in its backward pass") as caught:
            plain_loss(model, rank, 1).backward()
        assert caught.value.failed_ranks == (1,)
    train_on(model)


@ranks(2)
def test_an_exception_under_no_sync_concerns_nobody_else() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp())
    if rank == 1:
        with pytest.raises(Trouble), model.no_sync():
            failing(model, rank, 0, 2).backward()
    train_on(model)


@ranks(2)
def test_an_exception_in_forward_on_all_ranks() -> None:
    model = px.DistributedDataParallel(mlp())
    plain_loss(model, dist.get_rank(), 0).backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(2, 5))
    train_on(model)


@ranks(2, timeout_s=20)
def test_a_reused_layer_on_one_rank_alone_is_told_on_both() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(Branches())
    model(batch(rank)).sum().backward()
    if rank == 1:
        loss = _reentrant(model.module.stem, model(batch(rank)).sum())
        with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once"):
            loss.backward()
    else:
        with pytest.raises(PeerFailedError) as caught:
            model(batch(rank)).sum().backward()
        assert caught.value.failed_ranks == (1,)
    flush_engine()


def _reentrant(layer: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(1, 6, requires_grad=True)
    return loss + checkpoint(layer, x, use_reentrant=True).sum() + checkpoint(layer, x, use_reentrant=True).sum()


# -- steps that do not end --------------------------------------------------------------------------------------------


@ranks(2)
def test_an_unfinished_step_is_told_on_every_rank_in_torchs_words() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(Branches())
    model(batch(rank), (0,)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(batch(rank), (0,))
    text = str(caught.value)
    assert f"Parameter indices which did not receive grad for rank {rank}: 4 5" in text
    assert "branches.1.weight, branches.1.bias" in text and "find_unused_parameters=True" in text


@ranks(3, timeout_s=20)
def test_a_step_unfinished_on_one_rank_alone_wakes_the_others_with_the_cause() -> None:
    """Rank 1 leaves a parameter out; its next forward finds out, while the others wait for it in backward."""
    rank = dist.get_rank()
    model = px.DistributedDataParallel(Branches())
    began = time.monotonic()
    if rank == 1:
        model(batch(rank), (0,)).sum().backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(batch(rank), (0,))
    else:
        with pytest.raises(PeerFailedError, match="rank 1 failed: Expected to have finished reduction") as caught:
            model(batch(rank)).sum().backward()
        assert "branches.1.weight" in str(caught.value)
    assert time.monotonic() - began < 10


@ranks(2, timeout_s=20, expect_exit={1: 3}, allow_leaks="a rank leaves in the middle of a step")
def test_a_rank_that_leaves_is_named() -> None:
    import os

    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp())
    plain_loss(model, rank, 0).backward()
    if rank == 1:
        os._exit(3)
    with pytest.raises(PhalanxError, match="rank 1"):
        plain_loss(model, rank, 1).backward()
