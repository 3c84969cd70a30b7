"""What debugging shows, beside what torch's class shows: logging data, debug levels, traces, barriers, environment."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parity.features.sides import Sides
from tests.ranks.pairs import Branches, Pair, square_loss
from tests.ranks.replicas import batch, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import distributed as torch_ddp

import phalanx as px

ADDED = {"can_set_static_graph"}  # torch's documentation names it; torch writes it when the module is destroyed


def _one_branch(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(batch(rank, step), (0,)).square().mean()


def _differences(pair: Pair) -> set[str]:
    mine, other = (model._get_ddp_logging_data() for model in pair.both())
    keys = (set(mine) | set(other)) - ADDED
    return {k for k in keys if (k in mine) != (k in other) or ("time" not in k and mine[k] != other[k])}


def hooks_and_joins_are_named(sides: Sides) -> None:
    pair = sides.pair(mlp)
    for model in pair.both():
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
        with model.join():
            for step in range(2 + sides.rank % 2):
                square_loss(model, sides.rank, step).backward()
    assert pair.ours._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"
    assert pair.ours._get_ddp_logging_data()["join_uneven_inputs"] == 1
    assert _differences(pair) == set()
    pair = sides.pair_with_gloo(mlp)
    for model in pair.both():
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        square_loss(model, sides.rank, 0).backward()
    of_gloo = {
        key for key in _differences(pair) if key.startswith("gloo_")
    }  # where torch's class is, and ours may not be
    assert _differences(pair) - of_gloo <= {"backend_name"}


def errors_are_told(sides: Sides) -> None:
    pair = sides.pair(Branches)
    for model in pair.both():
        _one_branch(model, sides.rank, 0).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            _one_branch(model, sides.rank, 1)
    mine = pair.ours._get_ddp_logging_data()
    assert mine["has_error"] == 1 and "branches.1.weight, branches.1.bias" in mine["error"]
    assert _differences(pair) == {"error"}  # ours has the names at any debug level


def some_steps_are_sampled(sides: Sides) -> None:
    seen: list[list[int]] = []
    for model in sides.pair(mlp).both():
        model._set_ddp_runtime_logging_sample_rate(3)
        seen.append([])
        for step in range(14):
            square_loss(model, sides.rank, step).backward()
            seen[-1].append(model._get_ddp_logging_data()["iteration"])
    assert seen[0] == seen[1] and len(set(seen[0])) < 14


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage().split("\n")[0])


def levels_say_more_and_more(sides: Sides) -> None:
    """And the level is in the data under torch's key, as torch's own class has it."""
    log, level = logging.getLogger("phalanx.api.ddp.logger"), dist.get_debug_level()
    handler, before = _Keep(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    said = []
    try:
        for name in ("OFF", "INFO"):
            dist.set_debug_level(getattr(dist.DebugLevel, name))
            handler.said.clear()
            pair = sides.pair(Branches, find_unused_parameters=True)
            for step in range(2):
                for model in pair.both():
                    _one_branch(model, sides.rank, step).backward()
            assert _differences(pair) == set(), name
            said.append([*handler.said])
    finally:
        dist.set_debug_level(level)
        log.removeHandler(handler)
        log.setLevel(before)
    assert said[0] == [] and len(said[1]) == 2
    assert said[1][1].startswith(f"rank {sides.rank}: unused in the first step: branches.1.weight, branches.1.bias")


def execution_traces(sides: Sides) -> None:
    """As often as torch's class, the same spans are there; and ours has one for each bucket, and for the end."""
    counts: list[list[int]] = []
    pair = sides.pair(mlp, find_unused_parameters=True)
    for model in pair.both():
        for step in range(2):
            square_loss(model, sides.rank, step).backward()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "et.json"
            observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], execution_trace_observer=observer
            ):
                square_loss(model, sides.rank, 3).backward()
            names = [node["name"] for node in json.loads(path.read_text())["nodes"]]
        spans = ("DistributedDataParallel.forward", "search_unused_parameters")  # torch's has a prefix
        counts.append([sum(name.endswith(span) for name in names) for span in spans])
        if model is pair.ours:
            assert sum(name.startswith("phalanx.bucket Sequential #") for name in names) == 1
            assert names.count("phalanx.finalize Sequential") == 1
    assert counts[0] == counts[1] == [1, 1], counts


def monitored_barrier(sides: Sides) -> None:
    """All but rank 0 stay away: torch's barrier, which is Gloo's, names them, and so does ours on either."""
    group = dist.new_group()
    px.monitored_barrier(group, timeout_s=20)
    if sides.rank == 0:
        missing = ".*".join(str(rank) for rank in range(1, sides.size))
        with pytest.raises(RuntimeError, match=rf"(?is)rank.*{missing}.*failed to pass"):
            px.monitored_barrier(group, timeout_s=0.3, wait_all_ranks=True)


def environment(sides: Sides) -> None:
    """All that torch's dump prints and that is set, with the launcher's values of this very rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        torch_ddp._dump_DDP_relevant_env_vars()
    pairs = [line.removeprefix("env:").partition("=")[::2] for line in printed.getvalue().split()]
    wanted: dict[str, Any] = {name: value for name, value in pairs if value != "N/A"}
    found = px.environment()
    assert wanted["RANK"] == str(sides.rank) and wanted["WORLD_SIZE"] == str(sides.size)
    assert {name: found.get(name) for name in wanted} == wanted


CHECKS = (
    hooks_and_joins_are_named,
    errors_are_told,
    some_steps_are_sampled,
    levels_say_more_and_more,
    execution_traces,
    environment,
    monitored_barrier,  # last: rank 0 leaves it with an error that others do not have
)
