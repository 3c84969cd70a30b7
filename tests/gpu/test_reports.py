"""What ranks tell each other of a step, on NCCL itself: alike, of one alone, and of one that fails.

The bodies are those of `tests/ranks/test_deferred_reports.py`, which has the CPU act as if streams waited. Here they do.

    PYTHONPATH=src python tests/gpu/test_reports.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import DEVICE, ON_GPU, Check, gpu, main, run_checks, several_gpus

try:
    from tests.ranks import test_deferred_reports as reports
except ImportError:  # it wants pytest
    reports = None  # type: ignore[assignment]

pytestmark = gpu
_randn = torch.randn


def randn(*shape: int, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
    """The same numbers as on the CPU."""
    if generator is None:
        return _randn(*shape, **options)
    return _randn(*shape, generator=generator, device="cpu", **options).to(options.get("device", DEVICE))


class OnDevice:
    """A body that makes its models and data wherever torch does by itself, there."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        self.__name__ = body.__name__
        self._body, self._args = body, args

    def __call__(self) -> None:
        torch.randn = randn  # in a rank's own process, which ends with the test
        torch.set_default_device(DEVICE)
        self._body(*self._args)


def checks() -> list[Check]:
    """In one group one after the other: ranks that were out of step after one would not get through the next."""
    alike = ["regular", "unused", "accumulated", "frozen", "weighted", "joined", "late"]
    alone = ["evaluating", "changed_on_one", "frozen_on_one"]
    with_model = [
        OnDevice(reports.one_raises, rank, make, at)
        for make in (reports.mlp, reports.with_buffer)
        for rank in (0, 1)
        for at in (0, 1, 6)
    ]
    with_model += [OnDevice(reports.weight_on_one, make) for make in (reports.mlp, reports.with_buffer)]
    return [
        *(OnDevice(getattr(reports, name)) for name in (*alike, *alone)),
        *with_model,
        OnDevice(reports.raises_in_the_last_step),
    ]


@several_gpus
def test_two_or_three_ranks_on_nccl() -> None:
    for world_size in range(2, min(torch.cuda.device_count(), 3) + 1):
        run_checks(checks(), world_size=world_size, backend="nccl")


if __name__ == "__main__":
    if reports is None or not ON_GPU:
        print("left out: this wants pytest, and a GPU")
    else:
        main(test_two_or_three_ranks_on_nccl)
