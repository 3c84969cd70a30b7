"""Transformers' Trainer on a tiny model: the same script with torch's DDP and with ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers.trainer  # noqa: F401  # here, so that the ranks are forked from a process that has it
from tests.frameworks.runs import check_same, run, run_on_torch
from transformers import GPT2LMHeadModel  # noqa: F401

PROGRAM = "transformers_train.py"
VARIANTS = {
    "plain": [],
    "accumulating": ["--accumulate", "2"],
    "checkpointed": ["--gradient-checkpointing", "--accumulate", "2"],
    "resumed": ["--resume"],
}


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_the_same_weights(arguments: list[str], backend: str, tmp_path: Path) -> None:
    expected = run_on_torch(PROGRAM, *arguments)
    check_same(run(PROGRAM, tmp_path / "ours", *arguments, swap=True, backend=backend), expected, backend=backend)
