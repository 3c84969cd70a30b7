"""Every feature of DDP's contract, at two and three ranks, on Gloo and on shared memory.

One launch of ranks runs the checks of one feature one after the other, since most of a launch is not what it checks. Each
compares with torch's own class, optimizer or hook, or with one process on the union of the data. What `tests/ranks` has in
all four cells already is not repeated here.
"""

from __future__ import annotations

import importlib

import pytest
import torch.distributed.optim  # noqa: F401  here: inside a group its import keeps that alive
from tests.parity.features.sides import Sides

from phalanx.testing import run_ranks

FEATURES = (
    "joining",
    "weighing",
    "lowering",
    "normalising",
    "sampling",
    "stepping",
    "hooking",
    "reducing",
    "debugging",
    "averaging",
)
LEAVES = {
    "stepping": "torch keeps the parameters given to _apply_optimizer_in_backward in a table for good",
    "debugging": "a rank stays away from a barrier, whose group is not closed by all",
}


def run_checks(feature: str) -> None:
    checks = importlib.import_module(f"tests.parity.features.{feature}").CHECKS
    sides = Sides()
    for check in checks:
        try:
            check(sides)
        except BaseException as error:
            error.add_note(f"in the check {feature}.{check.__name__}, {sides.size} ranks")
            raise


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("feature", FEATURES)
def test_parity(feature: str, world_size: int, backend: str) -> None:
    run_ranks(run_checks, world_size, feature, backend=backend, timeout_s=50, allow_leaks=LEAVES.get(feature, ""))
