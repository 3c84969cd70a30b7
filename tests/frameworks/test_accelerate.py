"""Accelerate: the same script with torch's DDP and with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs  # here, so that ranks are forked from a process that has it
from tests.frameworks.runs import PROGRAMS, check_same, run, run_on_torch

from phalanx.compose.accelerate import PhalanxPlugin
from phalanx.testing import run_ranks

PROGRAM = "accelerate_train.py"
VARIANTS = {
    "plain": [],
    "accumulating": ["--accumulate", "2"],
    "accumulating by hand": ["--by-hand"],
    "resumed": ["--resume", "--accumulate", "3"],
    "with a communication hook": ["--comm-hook"],
}


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_the_same_weights(arguments: list[str], backend: str, tmp_path: Path) -> None:
    expected = run_on_torch(PROGRAM, *arguments)
    check_same(run(PROGRAM, tmp_path / "ours", *arguments, swap=True, backend=backend), expected, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_said_in_the_script(backend: str, tmp_path: Path) -> None:
    expected = run_on_torch(PROGRAM, "--accumulate", "2")
    arguments = [] if backend == "gloo" else [backend]
    check_same(run("plugin_train.py", tmp_path / "ours", *arguments, swap=False), expected, backend=backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "carrier pigeon"}, "backend must be a backend of torch.distributed or None, got 'carrier pigeon'"),
        ({"ddp": {"find_unused": True}}, "ddp takes the options .*find_unused_parameters.*; got 'find_unused'"),
    ],
)
def test_options_that_do_not_exist(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PhalanxPlugin(**options)


def test_options_given_twice() -> None:
    plugin = PhalanxPlugin(ddp={"find_unused_parameters": True})
    with pytest.raises(ValueError, match="given twice"):
        plugin.accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs()])


def _with_a_group_of_gloo() -> None:
    with pytest.raises(ValueError, match="backend 'gloo' already, and the plugin asks for 'phalanx'"):
        PhalanxPlugin(backend="phalanx").accelerator(cpu=True)


def test_another_group_is_there_already() -> None:
    run_ranks(_with_a_group_of_gloo, 2, backend="gloo")


@pytest.mark.timeout(240)
def test_under_torchrun(tmp_path: Path) -> None:
    """The command that a user types, once: everything else runs in forked ranks."""
    expected = run_on_torch(PROGRAM, "--accumulate", "2")
    (tmp_path / "ours").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = [
        "--nproc-per-node",
        "2",
        "-m",
        "phalanx.swap_ddp",
        str(PROGRAMS / PROGRAM),
        str(tmp_path / "ours"),
        "--accumulate",
        "2",
    ]
    subprocess.run(
        [*torchrun, *program],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"},
        timeout=160,
    )
    check_same([torch.load(tmp_path / "ours" / f"rank{rank}.pt") for rank in range(2)], expected)
