"""Lightning, Trainer and Fabric: the same scripts with torch's DDP and with ours."""

from __future__ import annotations

from pathlib import Path

import lightning  # here, so that the ranks are forked from a process that has it
import lightning.fabric  # noqa: F401
import pytest
from tests.frameworks.runs import check_same, run

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
    expected = run(program, tmp_path / "torch", *arguments, swap=False)
    check_same(run(program, tmp_path / "ours", *arguments, swap=True, backend=backend), expected, backend=backend)
