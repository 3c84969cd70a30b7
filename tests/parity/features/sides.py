"""What the checks of one launch share: a process group for our class, one for torch's, and how close is close."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.pairs import Pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px


class Sides:
    """Groups for any number of pairs: making one costs more than what is checked on it."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ours, self.theirs = dist.new_group(), dist.new_group()

    def pair(self, make: Callable[[], nn.Module], **options: Any) -> Pair:
        return Pair(self.mine(make(), **options), self.other(make(), **options))

    def pair_with_gloo(self, make: Callable[[], nn.Module], **options: Any) -> Pair:
        """For what torch's class can do on a group written in C++ only: torch's is on Gloo, ours where it is."""
        return Pair(self.mine(make(), **options), TorchDDP(make(), process_group=self._gloo, **options))

    @cached_property
    def _gloo(self) -> dist.ProcessGroup:
        return self.theirs if dist.get_backend(self.theirs) == "gloo" else dist.new_group(backend="gloo")

    def mine(self, module: nn.Module, **options: Any) -> px.DistributedDataParallel:
        return px.DistributedDataParallel(module, process_group=self.ours, **options)

    def other(self, module: nn.Module, **options: Any) -> TorchDDP:
        return TorchDDP(module, process_group=self.theirs, **options)

    @property
    def close(self) -> dict[str, float]:
        """Two ranks add up to the same bits; of three, the backend and the layout of buckets choose the order."""
        return {"rtol": 0.0, "atol": 0.0} if self.size == 2 else {"rtol": 1e-4, "atol": 1e-6}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def assert_all_close(mine: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], what: str, **close: float) -> None:
    for number, (value, other) in enumerate(zip(mine, wanted, strict=True)):
        said = f"{what}, tensor {number}: "
        torch.testing.assert_close(value, other, msg=lambda text, said=said: said + text, **close)
