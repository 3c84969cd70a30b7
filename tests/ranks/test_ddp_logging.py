"""`_get_ddp_logging_data` beside torch's own, what TORCH_DISTRIBUTED_DEBUG adds, and what the profiler shows."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Branches, Pair, image_loss, square_loss
from tests.ranks.replicas import SMALL, batch, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.errors import MismatchError
from phalanx.testing import ranks, run_ranks

EVERYWHERE = [(2, "gloo"), (3, "gloo"), (2, "phalanx"), (3, "phalanx")]
DURATIONS = ["forward_compute_time", "backward_compute_time", "backward_comm_time"]
ADDED = {"can_set_static_graph"}  # torch's documentation names it; torch writes it when the module is destroyed


def one_branch(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step), (0,)).square().mean()


def differences(pair: Pair) -> dict[str, tuple[Any, Any]]:
    """Keys that only one has, and values that differ and are no times."""
    mine, other = (model._get_ddp_logging_data() for model in pair.both())
    keys = (set(mine) | set(other)) - ADDED
    return {
        key: (mine.get(key), other.get(key))
        for key in keys
        if (key in mine) != (key in other) or ("time" not in key and mine[key] != other[key])
    }


CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any]]] = {
    "plain": (mlp, square_loss, {}),
    "buffers": (BatchNormNet, image_loss, {"forward_sync_buffers": False}),
    "double": (lambda: mlp().double(), lambda m, r, s: m(batch(r, s).double()).square().mean(), {}),
    "views": (mlp, square_loss, {"gradient_as_bucket_view": True}),
    "small buckets": (mlp, square_loss, {"bucket_cap_mb": 0.0002}),
    "listed buckets": (mlp, square_loss, {"bucket_cap_mb_list": [0.0001, 0.0002]}),
    "looks for unused": (mlp, square_loss, {"find_unused_parameters": True}),
    "finds unused": (Branches, one_branch, {"find_unused_parameters": True, "bucket_cap_mb": 0.0001}),
    "skips unused": (
        Branches,
        one_branch,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0001},
    ),
    "static": (mlp, square_loss, {"static_graph": True}),
}


def check_parity() -> None:
    groups = dist.new_group(), dist.new_group()
    for name, (make, loss, options) in CASES.items():
        pair = Pair(
            px.DistributedDataParallel(make(), process_group=groups[0], **options),
            TorchDDP(make(), process_group=groups[1], **options),
        )
        assert differences(pair) == {}, f"{name}, new"
        steps = 5 if options.get("static_graph") else 3  # torch lays a static graph out a step later than ours
        for step in range(steps):
            for model in pair.both():
                model.zero_grad()
                loss(model, dist.get_rank(), step).backward()
            if step == 0 or step == steps - 1:
                assert differences(pair) == {}, f"{name}, after {step + 1} steps"


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
def test_keys_and_values_are_torchs(world_size: int, backend: str) -> None:
    run_ranks(check_parity, world_size, backend=backend)


@ranks(2)
def test_hooks_and_uneven_inputs_are_named() -> None:
    pair = Pair.of(mlp)
    for model in pair.both():
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert pair.ours._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"
    assert differences(pair) == {}
    pair = Pair.of(mlp)
    for model in pair.both():
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        with model.join():
            pass
    assert pair.ours._get_ddp_logging_data()["join_uneven_inputs"] == 1
    assert differences(pair) == {}


@ranks(2)
def test_times_are_in_order_and_since_the_epoch() -> None:
    model = px.DistributedDataParallel(mlp())
    before = time.time_ns()
    for step in range(3):
        square_loss(model, dist.get_rank(), step).backward()
    data = model._get_ddp_logging_data()
    assert all(data[key] > 0 and data[f"avg_{key}"] > 0 for key in DURATIONS)
    marks = [data[f"{key}_start"] for key in ("forward_compute_time", "backward_compute_time", "backward_comm_time")]
    assert before <= marks[0] < marks[1] < marks[2] < data["backward_comm_time_end"] <= time.time_ns()
    assert data["backward_compute_time_start"] < data["backward_compute_time_end"]
    assert data["backward_compute_comm_overlap_time"] <= data["backward_compute_time"]


@ranks(2)
def test_one_step_in_so_many_is_sampled() -> None:
    pair = Pair.of(mlp)
    for model in pair.both():
        model._set_ddp_runtime_logging_sample_rate(4)
        seen = []
        for step in range(18):
            square_loss(model, dist.get_rank(), step).backward()
            seen.append(model._get_ddp_logging_data()["iteration"])
        assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 12, 12, 12, 12, 16, 16]
        with pytest.raises(ValueError, match="equal or greater than 1"):
            model._set_ddp_runtime_logging_sample_rate(0)
        assert "equal or greater than 1" in model._get_ddp_logging_data()["error"]


@ranks(2)
def test_an_unfinished_step_is_an_error_in_the_data() -> None:
    pair = Pair.of(Branches)
    for model in pair.both():
        one_branch(model, dist.get_rank(), 0).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            one_branch(model, dist.get_rank(), 1)
    mine = pair.ours._get_ddp_logging_data()
    assert mine["has_error"] == 1 and "branches.1.weight, branches.1.bias" in mine["error"]
    assert set(differences(pair)) == {"error"}  # ours has the names at any debug level
    assert mine["backward_compute_time"] > 0 and mine["backward_comm_time"] == 0


@ranks(2)
def test_whether_the_graph_is_static_is_told() -> None:
    for changes in (False, True):
        model = px.DistributedDataParallel(Branches(), find_unused_parameters=True)
        for step in range(4):
            model(batch(dist.get_rank(), step), (step % 2 if changes else 0,)).square().mean().backward()
        assert model._get_ddp_logging_data()["can_set_static_graph"] == int(not changes)


@ranks(2)
def test_a_flag_that_finds_nothing_is_told() -> None:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep()
    logging.getLogger("phalanx.api.ddp.logger").addHandler(handler)
    for used in ((0, 1), (0,)):
        model = px.DistributedDataParallel(Branches(), find_unused_parameters=True)
        for step in range(3):
            model(batch(dist.get_rank(), step), used).square().mean().backward()
    assert len(said) == 1 and "used every parameter" in said[0]


# -- TORCH_DISTRIBUTED_DEBUG ------------------------------------------------------------------------------------------


def check_debug(level: str, backend: str) -> None:
    """torch 2.13's own class dies of a segmentation fault in its constructor under DETAIL on Gloo."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log = logging.getLogger("phalanx.api.ddp.logger")
    log.addHandler(Keep())
    log.setLevel(logging.INFO)
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = px.DistributedDataParallel(Branches(), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        one_branch(model, rank, step).backward()
    assert model.module.branches[1].weight.grad is None
    replica = px.replicate(mlp(), **SMALL)
    square_loss(replica, rank, 0).backward()
    assert model._get_ddp_logging_data()["torch_distributed_debug"] == level
    titles = [text.split("\n")[0] for text in said]
    expected = {
        "OFF": [],
        "INFO": [f"rank {rank}: DDP initialised with", f"rank {rank}: unused in the first step: "],
        "DETAIL": [
            f"rank {rank}: DDP initialised with",
            f"rank {rank}: unused in the first step: ",
            f"rank {rank}: iteration 1",
            f"rank {rank}: iteration 2",
        ],
    }[level]
    assert [title[: len(start)] for title, start in zip(titles, expected, strict=True)] == expected
    if level != "OFF":
        assert "branches.1.weight, branches.1.bias" in titles[1] and "bucket_cap_bytes: 26214400" in said[0]
    if level == "DETAIL":  # both say which rank called what; the shared memory group does at any level
        shape = [3] if rank == size - 1 else [2]
        with pytest.raises((RuntimeError, MismatchError), match=r"(?i)mismatch|different collectives"):
            dist.all_reduce(torch.ones(shape))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "level, world_size, backend",
    [(level, 2, backend) for level in ("OFF", "INFO", "DETAIL") for backend in ("gloo", "phalanx")]
    + [("DETAIL", 3, backend) for backend in ("gloo", "phalanx")],
)
def test_debug_levels(level: str, world_size: int, backend: str) -> None:
    run_ranks(check_debug, world_size, level, backend, backend=None, allow_leaks="a group that failed on purpose")


# -- the profiler -----------------------------------------------------------------------------------------------------


def spans_of(act: Callable[[], None], folder: str, **options: Any) -> list[dict[str, Any]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, **options) as got:
        act()
    path = Path(folder) / f"trace{dist.get_rank()}.json"
    got.export_chrome_trace(str(path))
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def check_spans(folder: str) -> None:
    rank = dist.get_rank()
    ddp = px.DistributedDataParallel(mlp(), bucket_cap_mb=0.0002)
    replica = px.replicate(mlp(), **SMALL)
    for model in (ddp, replica):
        for step in range(3):
            square_loss(model, rank, step).backward()
        engine = ddp._engine if model is ddp else None
        spans = spans_of(lambda model=model: square_loss(model, rank, 3).backward(), folder)
        forwards = [s for s in spans if s["name"] == "DistributedDataParallel.forward"]
        assert len(forwards) == (model is ddp)
        buckets = [s for s in spans if s["name"].startswith("phalanx.bucket Sequential #")]
        assert len(buckets) > 1 and (engine is None or len(buckets) == len(engine.buckets))
        names = [name for s in buckets for name in s["args"]["parameters"].split(", ")]
        assert sorted(names) == sorted(name for name, _ in mlp().named_parameters())
        assert [s["args"]["bucket"] for s in buckets] == [str(n) for n in range(len(buckets))]
        (finalize,) = [s for s in spans if s["name"] == "phalanx.finalize Sequential"]
        assert finalize["ts"] >= buckets[0]["ts"]
        reductions = [s for s in spans if s["name"].endswith(":all_reduce")]
        assert len(reductions) >= len(buckets)


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
def test_buckets_and_the_end_of_a_step_are_spans(world_size: int, backend: str, tmp_path: Path) -> None:
    run_ranks(check_spans, world_size, str(tmp_path), backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_an_execution_trace_has_them_too(backend: str, tmp_path: Path) -> None:
    @ranks(2, backend=backend)
    def body(folder: str) -> None:
        rank = dist.get_rank()
        model = px.DistributedDataParallel(mlp(), find_unused_parameters=True)
        for step in range(3):
            square_loss(model, rank, step).backward()
        path = Path(folder) / f"{rank}.et.json"
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
        spans_of(lambda: square_loss(model, rank, 3).backward(), folder, execution_trace_observer=observer)
        names = [node["name"] for node in json.loads(path.read_text())["nodes"]]
        assert names.count("DistributedDataParallel.forward") == 1
        assert names.count("search_unused_parameters") == 1
        assert any(name.startswith("phalanx.bucket Sequential #0") for name in names)
        assert "phalanx.finalize Sequential" in names

    body(str(tmp_path))
