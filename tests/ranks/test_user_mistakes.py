"""Mistakes that a new user made: each was silent, or told something else than what was wrong."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx as px
from phalanx.errors import CollectiveTimeoutError, MismatchError, PeerFailedError, PhalanxError, UnsynchronizedStepError
from phalanx.reducer import verify
from phalanx.reducer.plan import default_policy
from phalanx.testing import ranks, run_ranks

TorchDDP = nn.parallel.DistributedDataParallel
BACKENDS = ["gloo", "phalanx"]


def trained(**options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = px.replicate(nn.Linear(4, 1), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(8, 4, generator=generator)).square().mean()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_last_group_that_is_shorter_is_not_stepped_on_unaveraged(backend: str) -> None:
    run_ranks(_short_last_group, 2, backend=backend)


def _short_last_group() -> None:
    model, optimizer = trained()
    for step in range(4):
        with px.no_sync(model) if step % 2 == 0 else contextlib.nullcontext():
            loss_of(model, step).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    with px.no_sync(model):
        loss_of(model, 4).backward()
    with pytest.raises(UnsynchronizedStepError, match=r"kept by backward passes in phalanx\.no_sync.*weight"):
        optimizer.step()
    px.synchronize(model)  # what the error says
    optimizer.step()
    both = [torch.empty_like(model.weight) for _ in range(2)]
    dist.all_gather(both, model.weight.detach())
    assert torch.equal(*both)


@ranks(2)
def test_what_may_be_stepped_on_alone() -> None:
    model, optimizer = trained()
    with px.no_sync(model):  # local steps are meant
        loss_of(model).backward()
        optimizer.step()
    optimizer.zero_grad()
    with px.no_sync(model):
        loss_of(model).backward()
    optimizer.zero_grad()  # thrown away
    optimizer.step()
    loss_of(model, 1).backward()
    optimizer.step()


@ranks(2)
def test_torchs_ddp_around_a_replicated_module() -> None:
    model = px.replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for wrapped in (model, nn.Sequential(model, nn.Linear(2, 2))):
        with pytest.raises(
            ValueError, match=r"already replicated.*do not wrap it in DistributedDataParallel.*unreplicate"
        ):
            TorchDDP(wrapped)
    px.unreplicate(model)
    ddp = TorchDDP(model)
    ddp(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    assert model[1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("set_later", [False, True])
def test_the_time_out_reaches_a_replicated_module(backend: str, set_later: bool, tmp_path) -> None:
    run_ranks(
        _late_rank, 2, backend, set_later, f"file://{tmp_path}/store", backend=None, allow_leaks="a call that timed out"
    )


def _late_rank(backend: str, set_later: bool, where: str) -> None:
    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=60 if set_later else 2)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=2, timeout=timeout)
    model, _ = trained()
    loss_of(model).backward()
    if set_later:
        px.set_timeout(2)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 has given up"])
        with pytest.raises((PhalanxError, RuntimeError)):
            loss_of(model).backward()
    else:
        began = time.monotonic()
        with pytest.raises((CollectiveTimeoutError, PhalanxError), match=r"(?i)timed out|time-out"):
            loss_of(model).backward()
        assert 1 < time.monotonic() - began < 8
        store.set("rank 0 has given up", "")


@pytest.mark.parametrize("free_gradients", [True, False])
def test_an_optimizer_that_steps_in_backward_is_not_stepped_again(free_gradients: bool) -> None:
    @ranks(2)
    def body(free_gradients: bool) -> None:
        model, optimizer = trained()
        stepping = px.step_in_backward(model, optimizer, free_gradients=free_gradients)
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match=r"SGD steps in backward.*leave out optimizer\.step\(\)"):
            optimizer.step()
        assert stepping.num_steps == 1
        stepping.remove()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()

    body(free_gradients)


@ranks(2, allow_leaks="a module that failed")
def test_what_to_do_after_a_parameter_was_frozen_on_one_rank() -> None:
    model, _ = trained()
    loss_of(model).backward()
    if dist.get_rank() == 1:
        model.bias.requires_grad_(False)
    with pytest.raises(MismatchError, match=r"bias.*frozen.*on every rank.*unreplicate"):
        loss_of(model).backward()
    model.bias.requires_grad_(True)
    with pytest.raises(MismatchError) as caught:
        loss_of(model).backward()
    assert "found in an earlier step" in " ".join(caught.value.__notes__)
    px.replicate(px.unreplicate(model))
    model.zero_grad()
    loss_of(model).backward()


@ranks(2, backend="phalanx", allow_leaks="a module that failed")
def test_a_hook_whose_future_never_completes() -> None:
    model, _ = trained()
    px.register_hook(model, lambda state, bucket: torch.futures.Future())
    px.set_timeout(2)
    began = time.monotonic()
    with pytest.raises(PhalanxError, match=r"lambda.*did not complete within 2 s"):
        loss_of(model).backward()
    assert time.monotonic() - began < 10


@ranks(2, allow_leaks="a module that failed")
def test_a_parameter_added_on_one_rank() -> None:
    model, _ = trained()
    loss_of(model).backward()
    if dist.get_rank() == 1:
        model.more = nn.Parameter(torch.ones(1))
    match = (
        "parameter more was added" if dist.get_rank() == 1 else "rank 1 could not go on with its model: parameter more"
    )
    with pytest.raises((PhalanxError, PeerFailedError), match=match):
        loss_of(model).backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", ["buffers", "bucket_bytes"])
def test_options_that_differ(backend: str, option: str) -> None:
    run_ranks(_options_differ, 2, option, backend=backend)


def _options_differ(option: str) -> None:
    values = {"buffers": ("rank0", "mean"), "bucket_bytes": (500, 20000)}[option]
    mine = values[dist.get_rank()]
    with pytest.raises(MismatchError, match=f"different options.*{option}.*here {mine!r}.*the same on every rank"):
        px.replicate(nn.BatchNorm1d(4), **{option: mine})
    px.replicate(nn.BatchNorm1d(4), **{option: values[0]})


@pytest.mark.parametrize("wrap", [px.replicate, px.DistributedDataParallel])
def test_ranks_on_different_devices_do_not_plan_different_buckets_in_silence(wrap: Any) -> None:
    run_ranks(_plans_differ, 2, wrap)


def _plans_differ(wrap: Any) -> None:
    if dist.get_rank() == 1:  # as where its module is on a GPU
        for name in ("phalanx.api.replicate", "phalanx.api.ddp.options"):
            sys.modules[name].default_policy_for = lambda parts, **small: default_policy("cuda", 1 << 30, **small)
    with pytest.raises(
        MismatchError, match=r"the size of buckets .*not given, it depends on the device.*on every rank"
    ):
        wrap(nn.Linear(4, 1))


@ranks(2)
def test_arguments_that_cannot_be_right() -> None:
    model = nn.Linear(4, 1)
    for wrong, error, text in (
        (
            lambda: px.replicate(model, bucket_bytes="25"),
            ValueError,
            "bucket_bytes takes a positive number of bytes.*'25'",
        ),
        (lambda: px.replicate(model, bucket_bytes=0), ValueError, "positive number of bytes; got 0"),
        (lambda: px.replicate(model, ignore="weight"), TypeError, r"ignore takes a list of names.*\['weight'\]"),
        (lambda: px.weight(model, "3"), TypeError, "a weight is a number"),
        (lambda: px.synchronize(model.parameters()), TypeError, "given to phalanx.replicate, got generator"),
        (
            lambda: px.register_hook(px.replicate(nn.Linear(1, 1)), lambda bucket: bucket),
            TypeError,
            r"hook\(state, bucket\).*lambda.*does not take",
        ),
        (lambda: px.set_timeout("3"), TypeError, "a number of seconds, got '3'"),
        (lambda: px.set_timeout(-1), ValueError, "positive number of seconds, got -1"),
        (lambda: px.monitored_barrier(timeout_s="3"), TypeError, "a number of seconds"),
        (lambda: px.init(timeout_s="3"), TypeError, "a number of seconds"),
        (lambda: px.init(backend="nope"), ValueError, "no backend 'nope'; torch.distributed knows .*gloo"),
        (lambda: px.init(backend="phalanx"), ValueError, "joined its job with backend gloo, and phalanx is asked for"),
        (lambda: px.init(timeout_s=3), ValueError, r"phalanx\.set_timeout"),
    ):
        with pytest.raises(error, match=text):
            wrong()
    assert px.init(backend="gloo").world_size == 2


@ranks(2)
def test_mean_weights_below_sync_batch_norm_are_warned_of() -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
    model = px.replicate(nn.Sequential(nn.Linear(4, 4), px.SyncBatchNorm(4), nn.Linear(4, 1)))
    px.weight(model, 3)
    px.weight(model, 3)
    assert len([text for text in said if 'reduction="sum"' in text]) == 1
    loss_of(model).backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_come_to_replicate_is_waited_for_as_long_as_the_group_says(backend: str) -> None:
    run_ranks(_late_to_replicate, 2, backend=backend)


def _late_to_replicate() -> None:
    verify.PATIENCE_S = (0.1, verify.PATIENCE_S[1])  # a step may have a shorter time-out than building a model takes
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        with pytest.raises(MismatchError, match=r"rank 1 did not come within 0\.5 s"):
            px.replicate(nn.Linear(4, 1), process_group=group)
        store.set("gave up", "")
    else:
        store.wait(["gave up"])
