"""What the tests of torch.compile share: a model that is captured whole, a backend that says when its pieces ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed.tensor.experimental._attention  # loaded by compiled autograd; too late, it keeps the default group
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from phalanx import events

WIDTH = 16
NUM_LAYERS = 4
SMALL = {"bucket_bytes": 4 * WIDTH * WIDTH, "first_bucket_bytes": 4 * WIDTH * WIDTH}
"""A bucket per layer."""


class Net(nn.Module):
    """Of a class of its own: torch does not compile its containers in place."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, inputs: torch.Tensor, skip: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                inputs = torch.tanh(layer(inputs))
        return inputs


def batch(rank: int, step: int, *, size: int = 6) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


class Pieces:
    """A backend that runs captured graphs as they are, and notes when each piece of backward ended."""

    def __init__(self) -> None:
        self.num_forward = 0
        self.ended_at_s: list[float] = []
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.num_forward += 1
        return make_boxed_func(graph.forward)

    def _backward(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            outputs = graph.forward(*args)
            self.ended_at_s.append(time.perf_counter())
            return outputs

        return make_boxed_func(run)


def launches(seen: Sequence[events.Event]) -> list[float]:
    return [event.at_s for event in seen if isinstance(event, events.BucketLaunched)]


def graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def train(
    model: Callable[..., torch.Tensor],
    parameters: nn.Module,
    rank: int,
    *,
    steps: int = 4,
    to_none: bool = True,
    sizes: Sequence[int] = (6,),
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The losses of some steps of plain descent."""
    optimizer = torch.optim.SGD(parameters.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        loss = model(batch(rank, step, size=sizes[step % len(sizes)])).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after_step(step)
    return losses


def losses_alone(rank: int, *, world_size: int = 2, steps: int = 4, sizes: Sequence[int] = (6,)) -> list[float]:
    """The same in one process: descent on the mean of all ranks' losses, and this rank's part of them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        each = [model(batch(r, step, size=sizes[step % len(sizes)])).square().mean() for r in range(world_size)]
        torch.stack(each).mean().backward()
        optimizer.step()
        losses.append(each[rank].item())
    return losses


class Recompilations:
    """Counts captured graphs, after the first two steps."""

    def __init__(self) -> None:
        self.graphs: list[int] = []

    def after_step(self, _: int) -> None:
        self.graphs.append(counters["stats"]["unique_graphs"] + counters["compiled_autograd"]["captures"])

    @property
    def number(self) -> int:
        return self.graphs[-1] - self.graphs[1]
