"""Lightning, Trainer and Fabric: the same scripts with torch's DDP and with ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning.fabric  # here, so that the ranks are forked from a process that has it
import lightning.pytorch
import pytest
import torch
from tests.frameworks.runs import PROGRAMS, check_same, run, run_on_torch

from phalanx.compose.lightning import PhalanxFabricStrategy, PhalanxStrategy

TRAINER, FABRIC = "lightning_train.py", "fabric_train.py"
VARIANTS = {
    "trainer": (TRAINER, []),
    "trainer, accumulating": (TRAINER, ["--accumulate", "2"]),
    "trainer, resumed": (TRAINER, ["--resume"]),
    "trainer, by hand": (TRAINER, ["--manual"]),
    "trainer, static graph": (TRAINER, ["--static"]),
    "trainer, static graph, by hand": (TRAINER, ["--static", "--manual"]),
    "trainer, unused parameters": (TRAINER, ["--unused"]),
    "trainer, unused parameters, by hand": (TRAINER, ["--unused", "--manual"]),
    "fabric": (FABRIC, []),
    "fabric, accumulating": (FABRIC, ["--accumulate", "3"]),
    "fabric, resumed": (FABRIC, ["--resume"]),
}


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(("program", "arguments"), VARIANTS.values(), ids=VARIANTS)
def test_the_same_weights(program: str, arguments: list[str], backend: str, tmp_path: Path) -> None:
    expected = run_on_torch(program, *arguments)
    check_same(run(program, tmp_path / "ours", *arguments, swap=True, backend=backend), expected, backend=backend)


@pytest.mark.parametrize("program", [TRAINER, FABRIC])
def test_said_in_the_script(program: str, tmp_path: Path) -> None:
    arguments = ["--accumulate", "2"]
    expected = run_on_torch(program, *arguments)
    ours = run(program, tmp_path / "ours", *arguments, "--strategy", "phalanx", swap=False)
    check_same(ours, expected, backend="phalanx")


@pytest.mark.parametrize("strategy", [PhalanxStrategy, PhalanxFabricStrategy])
def test_options_that_do_not_exist(strategy: type) -> None:
    with pytest.raises(TypeError, match=r"has no option 'find_unused'. .*find_unused_parameters"):
        strategy(find_unused=True)
    with pytest.raises(TypeError, match="has no option 'module'"):  # Lightning's to give
        strategy(module=torch.nn.Linear(1, 1))
    assert strategy(static_graph=True, process_group_backend="gloo").process_group_backend == "gloo"
    assert strategy().process_group_backend == "phalanx"


def test_they_are_lightnings() -> None:
    assert issubclass(PhalanxStrategy, lightning.pytorch.strategies.DDPStrategy)
    assert issubclass(PhalanxFabricStrategy, lightning.fabric.strategies.DDPStrategy)
    for name in ("phalanx", "phalanx_find_unused_parameters_true"):
        assert name in lightning.pytorch.strategies.StrategyRegistry
        assert name in lightning.fabric.strategies.STRATEGY_REGISTRY


@pytest.mark.timeout(240)
def test_ranks_that_lightning_starts_itself(tmp_path: Path) -> None:
    """No torchrun: rank 0 starts rank 1 by its script's path, and both must be on Phalanx."""
    expected = run_on_torch(FABRIC)
    (tmp_path / "ours").mkdir()
    program = [sys.executable, "-m", "phalanx.swap_ddp", str(PROGRAMS / FABRIC), str(tmp_path / "ours")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1 attempts:1"}
    subprocess.run(program, check=True, env=env, timeout=160)
    check_same([torch.load(tmp_path / "ours" / f"rank{rank}.pt") for rank in range(2)], expected)
