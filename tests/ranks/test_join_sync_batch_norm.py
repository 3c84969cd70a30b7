"""Uneven inputs with SyncBatchNorm inside: ranks without data shadow the layers, and results are those of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import equal_on_all_ranks
from tests.ranks.uneven import CLOSE, assert_same_state, shares
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.api.sync_batch_norm import shadow
from phalanx.api.sync_batch_norm.channel import Channel
from phalanx.comm import c10d
from phalanx.errors import MismatchError, OutOfDataError, PeerFailedError, PhalanxError
from phalanx.testing import ranks, run_ranks

WORLDS = pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (2, "phalanx"), (3, "gloo"), (3, "phalanx")])
COUNTS = {2: ([2, 4], [0, 3], [3, 1]), 3: ([1, 4, 2], [0, 0, 2], [3, 1, 3])}


class Winding(nn.Module):
    """Takes another way in every step: which layers, in which order and how often, no rank can know from its last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Linear(6, 8)
        self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)])
        self.narrow = nn.Linear(8, 5)
        self.last = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        for turn in range(1 + step % 3):
            hidden = torch.tanh(self.norms[(step + turn) % 2](hidden)) + hidden
        if step % 2:
            hidden = checkpoint(self._narrowed, hidden, use_reentrant=False)
        else:
            hidden = self._narrowed(hidden)
        return self.head(hidden)

    def _narrowed(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.narrow(hidden)))


def _net() -> nn.Module:
    return Winding().double()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)


def _alone(counts: Sequence[int], *, by_all: bool = False, sync_every: int = 1) -> nn.Module:
    """One process on the batches of the ranks that have one, step by step."""
    model, data = _net(), shares(counts)
    optimizer = _sgd(model)
    for step in range(max(counts)):
        here = [share[step] for share in data if step < len(share)]
        share_of_ranks = len(here) / len(counts) if by_all else 1.0
        (model(torch.cat(here), step).square().mean() * share_of_ranks).backward()
        if step % sync_every == sync_every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return model


def _assert_alike_and_whole(model: nn.Module, run: nn.Module) -> None:
    """All ranks hold the same, and train on together."""
    run.zero_grad()
    run(torch.full((2, 6), float(dist.get_rank()), dtype=torch.float64).cumsum(0), 1).square().mean().backward()
    for tensor in [*model.state_dict().values(), *(p.grad for p in model.parameters() if p.grad is not None)]:
        assert equal_on_all_ranks(tensor)


# -- DistributedDataParallel.join ----------------------------------------------------------------------------------------


@WORLDS
def test_ddp_join_shadows_the_layers(world_size: int, backend: str) -> None:
    run_ranks(_ddp, world_size, backend=backend)


def _ddp() -> None:
    rank = dist.get_rank()
    for options, by_all, counts in zip(
        ({}, {"broadcast_buffers": False}, {"bucket_cap_mb": 0.0001}),
        (False, True, False),
        COUNTS[dist.get_world_size()],
        strict=True,
    ):
        net = px.synchronize_batch_norm(_net())
        model = px.DistributedDataParallel(net, find_unused_parameters=True, **options)
        optimizer = _sgd(model)
        with model.join(divide_by_initial_world_size=by_all):
            for step, batch in enumerate(shares(counts)[rank]):
                optimizer.zero_grad()
                model(batch, step).square().mean().backward()
                optimizer.step()
        assert_same_state(net, _alone(counts, by_all=by_all), **CLOSE)
        _assert_alike_and_whole(net, model)


@ranks(2)
def test_ddp_join_without_a_reduction_in_every_step() -> None:
    """In `no_sync` backward communicates all the same, in the layers, while a rank without data waits for a forward."""
    counts = [2, 6]
    net = px.synchronize_batch_norm(_net())
    model = px.DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = _sgd(model)
    with model.join(divide_by_initial_world_size=False):
        for step, batch in enumerate(shares(counts)[dist.get_rank()]):
            syncs = step % 2 == 1
            with nullcontext() if syncs else model.no_sync():
                model(batch, step).square().mean().backward()
            if syncs:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_state(net, _alone(counts, sync_every=2), **CLOSE)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ddp_join_with_a_hook_that_waits_in_the_middle_of_backward(backend: str) -> None:
    """The others then wait for a rank without data in a bucket before they come to a layer that waits for it, too."""
    run_ranks(_waits, 3, backend=backend)


def _waits() -> None:
    counts = [1, 3, 0]

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer().div_(dist.get_world_size()))
        return done

    net = px.synchronize_batch_norm(_net())
    model = px.DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.0001)
    model.register_comm_hook(None, hook)
    optimizer = _sgd(model)
    with model.join():
        for step, batch in enumerate(shares(counts)[dist.get_rank()]):
            optimizer.zero_grad()
            model(batch, step).square().mean().backward()
            optimizer.step()
    assert_same_state(net, _alone(counts, by_all=True), **CLOSE)


@ranks(3)
def test_several_models_share_the_layers_group() -> None:
    _several_models()


@ranks(3)
def test_a_listener_that_stops_looking_just_as_it_is_told() -> None:
    """It took the end of its look for a time-out of the group's, and the others waited for it in the layer."""
    c10d.LOOK_EVERY_S = 1e-4  # in a rank's own process, which ends with the test
    shadow.LOOK_EVERY_S = 0.0
    for _ in range(10):
        _several_models()


@ranks(3)
def test_a_listener_hears_of_a_layer_that_has_no_number_here_yet() -> None:
    """All ranks have met over the second model's layers, and others use the first while this one still numbers them."""
    heard = threading.Event()
    known, adopt = shadow.Listener._known, Channel.adopt

    def noted(self: shadow.Listener, number: int) -> nn.Module | None:
        if self._channel.layer(number) is None:
            heard.set()
        return known(self, number)

    def late(self: Channel, layer: nn.Module) -> None:
        assert not shadow._listeners or heard.wait(10)
        adopt(self, layer)

    shadow.Listener._known, Channel.adopt = noted, late  # type: ignore[method-assign]
    _several_models(broadcast_buffers=False)
    assert heard.is_set() == (dist.get_rank() == 2)


def _several_models(**options: Any) -> None:
    counts = [1, 3, 0]
    nets = [px.synchronize_batch_norm(_net()) for _ in range(2)]
    models = [px.DistributedDataParallel(net, find_unused_parameters=True, **options) for net in nets]
    optimizers = [_sgd(model) for model in models]
    with Join(models, divide_by_initial_world_size=True):
        for step, batch in enumerate(shares(counts)[dist.get_rank()]):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(batch, step).square().mean().backward()
                optimizer.step()
    for net in nets:
        assert_same_state(net, _alone(counts, by_all=True), **CLOSE)


@WORLDS
def test_throw_on_early_termination(world_size: int, backend: str) -> None:
    run_ranks(_throws, world_size, backend=backend)


def _throws() -> None:
    rank = dist.get_rank()
    for counts in COUNTS[dist.get_world_size()]:
        net = px.synchronize_batch_norm(_net())
        model = px.DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = _sgd(model)
        done = 0

        def train(model: Any = model, optimizer: Any = optimizer, counts: Any = counts) -> None:
            nonlocal done
            with model.join(throw_on_early_termination=True):
                for step, batch in enumerate(shares(counts)[rank]):
                    optimizer.zero_grad()
                    model(batch, step).square().mean().backward()
                    optimizer.step()
                    done += 1

        ends = counts[rank] == min(counts)
        message = f"Rank {rank} exhausted all inputs" if ends else "at least one rank that exhausted inputs"
        with pytest.raises(RuntimeError, match=message):
            train()
        assert done == min(counts)
        assert_same_state(net, _alone([done] * len(counts)), **CLOSE)


# -- px.join ---------------------------------------------------------------------------------------------------------------


@WORLDS
def test_px_join_shadows_the_layers(world_size: int, backend: str) -> None:
    run_ranks(_replicated, world_size, backend=backend)


def _replicated() -> None:
    rank = dist.get_rank()
    for own_loop, counts in zip((False, True, False), COUNTS[dist.get_world_size()], strict=True):
        model = px.replicate(px.synchronize_batch_norm(_net()))
        optimizer = _sgd(model)

        data = shares(counts)[rank]
        with px.join(model, optimizer) if own_loop else nullcontext():
            for step, batch in enumerate(data if own_loop else px.join(model, optimizer).over(data)):
                optimizer.zero_grad()
                model(batch, step).square().mean().backward()
                optimizer.step()
        assert_same_state(model, _alone(counts), **CLOSE)
        _assert_alike_and_whole(model, model)


@pytest.mark.parametrize("counts", [[3, 1], [0, 2]])
@pytest.mark.parametrize("own_loop", [False, True])
@ranks(2)
def test_px_join_that_names_who_ran_out(own_loop: bool, counts: list[int]) -> None:
    model = px.replicate(px.synchronize_batch_norm(_net()))
    data = shares(counts)[dist.get_rank()]
    done = 0

    def train() -> None:
        nonlocal done
        with px.join(model, when_out="error") if own_loop else nullcontext():
            for step, batch in enumerate(data if own_loop else px.join(model, when_out="error").over(data)):
                model.zero_grad()
                model(batch, step).square().mean().backward()
                done += 1

    with pytest.raises(OutOfDataError, match=f"rank {counts.index(min(counts))} ran out of data first"):
        train()
    assert done == min(counts)
    model.zero_grad()
    model(torch.ones(2, 6, dtype=torch.float64).cumsum(0), 1).square().mean().backward()
    assert all(equal_on_all_ranks(p.grad) for p in model.parameters() if p.grad is not None)


# -- what goes wrong, on every rank ----------------------------------------------------------------------------------------


class _Narrow(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor, skips: int = 0, extra: nn.Module | None = None) -> torch.Tensor:
        x = self[3](self[2](x)) if skips else super().forward(x)
        return x if extra is None else extra(x)


def _fails_in_a_shadowed_step(how: str, kind: str) -> None:
    """Rank 0 has no data left; of the others the last does something wrong. Nobody waits for ever."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if how == "forgotten layer":
        shadow.Listener._known = lambda self, number: None  # type: ignore[method-assign]
    net = px.synchronize_batch_norm(_Narrow())
    model: Any = px.DistributedDataParallel(net) if kind == "ddp" else px.replicate(net)
    extra = px.SyncBatchNorm(4)

    def loss() -> torch.Tensor:
        if how == "one value":
            return model(torch.ones(1 if rank == last else 0, 6)).sum()
        if how == "other layer":
            return model(torch.ones(3, 6) if rank != last else torch.ones(3, 4), rank == last).sum()
        return model(torch.ones(3, 6), extra=extra if how == "unknown layer" else None).sum()

    def train() -> None:
        with model.join() if kind == "ddp" else px.join(model):
            for _ in range(2 if rank else 0):
                loss().backward()

    wanted: Any = (MismatchError, PeerFailedError, ValueError)
    if how == "forgotten layer":  # by rank 0 alone: it leaves, and hears of whoever leaves because of that
        wanted = PhalanxError
    text = {
        "one value": "more than 1 value per channel",
        "other layer": "SyncBatchNorm: rank 0 has no data left, rank 1 is in the forward pass of layer number 1, rank 2",
        "unknown layer": "a SyncBatchNorm layer is used for the first time",
        "forgotten layer": "rank 0 has no data left and does not know a SyncBatchNorm layer that the others use|rank 1",
    }[how]
    with pytest.raises(wanted, match=text):
        train()


@pytest.mark.parametrize("kind", ["ddp", "replicate"])
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    ("how", "world_size"), [("one value", 2), ("unknown layer", 2), ("other layer", 3), ("forgotten layer", 2)]
)
def test_an_error_in_a_shadowed_step_reaches_every_rank(how: str, world_size: int, backend: str, kind: str) -> None:
    run_ranks(_fails_in_a_shadowed_step, world_size, how, kind, backend=backend)


@ranks(2)
def test_torchs_own_layer_cannot_be_shadowed() -> None:
    """In `join()` an error where torch's class hangs, and only once a rank has run out; `px.join` refuses at once."""
    model = px.DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.Identity()))
    model.module[1] = nn.SyncBatchNorm(4)  # wrapped on the CPU it would be refused

    def train() -> None:
        with model.join():
            for _ in range(dist.get_rank()):
                model(torch.ones(2, 6))

    with pytest.raises(RuntimeError, match=r"1 is a SyncBatchNorm of torch's own.*throw_on_early_termination=True"):
        train()
    dist.all_reduce(torch.ones(1))  # all ranks left at the same point
