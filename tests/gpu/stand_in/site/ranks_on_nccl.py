"""Lets tests of `tests/ranks`, which are written for the CPU, run their ranks on NCCL: models and data are made on a GPU.

To find what is wrong there, and not to pass: many of those tests ask for what only the CPU has (reports read at once,
tensors of their own on the CPU, a class of torch's that is newer). Each that fails has to be looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import phalanx.testing.rank as life


def set_up() -> None:
    """In the server that ranks are forked from, before there are any."""
    begin, run = life._init_process_group, life._run

    def on_nccl(request: Any, seat: Any) -> None:
        torch.cuda.set_device(seat.rank % torch.cuda.device_count())
        torch.set_default_device("cuda")
        for name in ("rand", "randn", "randint"):
            setattr(torch, name, _as_on_the_cpu(getattr(torch, name)))
        begin(dataclasses.replace(request, backend="nccl") if request.backend == "gloo" else request, seat)

    def without_leaks(request: Any, seat: Any) -> Any:
        return run(dataclasses.replace(request, check_leaks=False), seat)

    life._init_process_group, life._run = on_nccl, without_leaks


def _as_on_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same numbers, where a generator says which."""

    def made(*shape: Any, generator: torch.Generator | None = None, **options: Any) -> torch.Tensor:
        if generator is None or generator.device.type != "cpu":
            return make(*shape, generator=generator, **options)
        device = options.pop("device", "cuda")
        return make(*shape, generator=generator, device="cpu", **options).to(device)

    return made
