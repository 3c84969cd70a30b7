"""Framework programs in two ranks: with torch's DDP, and with ours."""

from __future__ import annotations

import functools
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import phalanx as px
from phalanx.testing import run_ranks

PROGRAMS = Path(__file__).parent / "programs"
OURS = "phalanx.api.ddp.module.DistributedDataParallel"
TORCHS = "torch.nn.parallel.distributed.DistributedDataParallel"


def run(program: str, folder: Path, *arguments: str, swap: bool, backend: str = "gloo") -> list[dict[str, Any]]:
    """What each of two ranks saved. `backend="phalanx"`: the group is made before the framework asks for one."""
    folder.mkdir()
    run_ranks(
        _rank,
        2,
        str(PROGRAMS / program),
        [str(folder), *arguments],
        swap,
        backend,
        backend=None,
        timeout_s=90,
        grace_s=5,
        allow_leaks="what a framework leaves behind is its own affair",
    )
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@functools.cache
def run_on_torch(program: str, *arguments: str) -> list[dict[str, Any]]:
    """What the ranks saved with torch's own DDP: run once, compared with several times."""
    with tempfile.TemporaryDirectory() as folder:
        return run(program, Path(folder) / "torch", *arguments, swap=False)


def _rank(program: str, arguments: list[str], swap: bool, backend: str) -> None:
    os.environ.update(
        # What torchrun sets beyond the harness; Lightning looks for it.
        TORCHELASTIC_RUN_ID="test",
        GROUP_RANK="0",
        ROLE_RANK=os.environ["RANK"],
        ROLE_WORLD_SIZE="2",
        # No test may reach for the network.
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    if backend != "gloo":
        px.init(backend=backend)
    if swap:
        from phalanx.swap_ddp import main

        sys.path.insert(0, os.getcwd())  # as `python -m` does
        main([program, *arguments])
    else:
        sys.argv[:] = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def check_same(got: list[dict[str, Any]], expected: list[dict[str, Any]], *, backend: str = "gloo") -> None:
    """Ours was used, torch's was used, and they ended with the same weights on every rank."""
    for rank in range(2):
        assert (got[rank]["class"], expected[rank]["class"]) == (OURS, TORCHS)
        assert (got[rank]["backend"], expected[rank]["backend"]) == (backend, "gloo")
        assert got[rank]["weights"].keys() == expected[rank]["weights"].keys()
        for name, weight in expected[rank]["weights"].items():
            torch.testing.assert_close(got[rank]["weights"][name], weight, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(got[rank]["loss"], expected[rank]["loss"], rtol=1e-6, atol=1e-6)
    for name, weight in got[0]["weights"].items():
        if "running" not in name:  # statistics of the last batch are each rank's own until the next forward
            assert torch.equal(weight, got[1]["weights"][name]), f"ranks differ in {name}"
