"""On one GPU: streams other than the default, CUDA graphs, and steps in which the host waits for nothing.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_streams.py``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import (
    ALONE,
    CLOSE,
    DEVICE,
    ON_GPU,
    ON_STAND_IN,
    State,
    beyond_the_stand_in,
    compare,
    data,
    device_ids,
    gpu,
    main,
    parameters_of,
    run_checks,
    several_gpus,
    torch_ddp,
)

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.reducer.reducer import Reducer

pytestmark = gpu

MIB = 1024 * 1024
WIDTH = (
    1024 if ON_GPU else 24
)  # 4 MiB a layer: a copy takes long enough that one who does not wait reads what was there
REPEATS = 30 if ON_GPU else 12


def replicated(module: nn.Module, **options: Any) -> nn.Module:
    model = px.replicate(module, **options)
    replica_of(model).reducer.communicate_alone()
    return model


def ddp(module: nn.Module, **options: Any) -> px.DistributedDataParallel:
    model = px.DistributedDataParallel(module, device_ids=device_ids(), **options)
    model._engine.communicate_alone()
    return model


OURS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": replicated,
    "replicate, small buckets": lambda module: replicated(module, bucket_bytes=5 * MIB, first_bucket_bytes=MIB),
    "ddp": ddp,
    "ddp, views": lambda module: ddp(module, gradient_as_bucket_view=True, bucket_cap_mb=5),
}


def wrapped(which: str, module: nn.Module) -> nn.Module:
    return torch_ddp(module) if which == "torch" else OURS[which](module)


def reducer_of(model: nn.Module) -> Reducer:
    return model._engine if isinstance(model, px.DistributedDataParallel) else replica_of(model).reducer


class Towers(nn.Module):
    """Two branches, each in a stream of its own if there are two, and a head behind both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.left = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.right = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 8)
        self.streams: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.streams:
            return self.head(torch.tanh(self.left(x)) + torch.tanh(self.right(x)))
        here = torch.cuda.current_stream()
        parts = []
        for branch, stream in zip((self.left, self.right), self.streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                parts.append(torch.tanh(branch(x)))
                x.record_stream(stream)
        for part, stream in zip(parts, self.streams, strict=True):
            here.wait_stream(stream)
            part.record_stream(here)
        return self.head(parts[0] + parts[1])


def new_stream() -> Any:
    return torch.cuda.Stream() if ON_GPU else None


def in_stream(stream: Any) -> Any:
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def busy(stream: Any = None) -> None:
    """Keep a stream occupied for some milliseconds: who does not wait for it is far ahead of it."""
    if ON_GPU:
        with in_stream(stream):
            torch.cuda._sleep(2_000_000)


def step_of(model: nn.Module, module: nn.Module, step: int) -> None:
    for parameter in module.parameters():
        parameter.grad = None
    model(data(dist.get_rank(), step % 5, 16, WIDTH)).square().mean().backward()


def update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.05)


def trained(which: str, kind: str) -> State:
    module = Towers().to(DEVICE)
    model = wrapped(which, module)
    if kind == "towers" and ON_GPU:
        module.streams = [new_stream(), new_stream()]
    side = new_stream() if kind in ("side", "alternating") else None
    # Gloo takes every gradient through the host's memory, which is slow.
    for step in range(REPEATS if dist.get_world_size() == 1 else 10):
        stream = None if kind == "alternating" and step // 4 % 2 else side
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream())
        with in_stream(stream):
            busy()
            for occupied in module.streams:
                busy(occupied)
            step_of(model, module, step)
            update(module)  # at once, in the stream of the step: a reduction that is not waited for shows
        if stream is not None:
            torch.cuda.default_stream().wait_stream(stream)
    return parameters_of(module)


FACES = list(OURS)


def check_forward_and_backward_in_a_side_stream() -> None:
    reference = trained("torch", "default")
    compare(lambda which: trained(which, "side"), FACES)
    again = trained("replicate", "side")
    for name, value in again.items():
        torch.testing.assert_close(value, reference[name], **CLOSE)


def check_the_default_stream() -> None:
    compare(lambda which: trained(which, "default"), FACES)


def check_branches_in_streams_of_their_own() -> None:
    compare(lambda which: trained(which, "towers"), FACES)
    mine, plain = trained("replicate, small buckets", "towers"), trained("torch", "default")
    for name, value in mine.items():
        torch.testing.assert_close(value, plain[name], **CLOSE)


def check_streams_that_change() -> None:
    compare(lambda which: trained(which, "alternating"), FACES)


def check_gradients_read_in_another_stream() -> None:
    """What the user reads, in a stream that waits for the one backward was called in, is the average."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for which in FACES:
        module = Towers().to(DEVICE)
        model = wrapped(which, module)
        other = new_stream()
        for step in range(12):
            busy()
            step_of(model, module, step)
            if other is not None:
                other.wait_stream(torch.cuda.current_stream())
            with in_stream(other):
                read = module.head.weight.grad.clone()
                if other is not None:
                    read.record_stream(torch.cuda.current_stream())
            if other is not None:
                torch.cuda.current_stream().wait_stream(other)
            total = read.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(total / size, read, msg=lambda text, which=which: f"{which} on {rank}: {text}")


# -- the host waits for nothing ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_host_waits() -> Any:
    if not ON_GPU:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_no_host_wait_in_a_steady_step() -> None:
    """`set_sync_debug_mode` sees what torch's operators do; that the host is ahead of the device is looked at besides."""
    for which in FACES:
        module = Towers().to(DEVICE)
        model = wrapped(which, module)
        batches = [data(dist.get_rank(), step, 16, WIDTH) for step in range(16)]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, foreach=True)

        def step_on(batch: torch.Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        for batch in batches[:6]:
            step_on(batch)
        assert reducer_of(model).arrivals.roll is not None, f"{which}: no roll after six alike steps"
        with no_host_waits():
            for batch in batches[6:]:
                step_on(batch)
        module.eval()  # which a rank of `replicate` tells the others, in every step
        for batch in batches[:2]:
            step_on(batch)
        with no_host_waits():
            for batch in batches[2:6]:
                step_on(batch)
        if not ON_GPU or ON_STAND_IN:  # there the device is never behind
            continue
        torch.cuda.synchronize()
        ended = torch.cuda.Event()
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for batch in batches[:1]:
            step_on(batch)
        ended.record()
        assert not ended.query(), f"{which}: the step returned only when the device had come to its end"


def check_no_memory_is_allocated_in_a_steady_step() -> None:
    if not ON_GPU:
        return
    for which in FACES:
        module = Towers().to(DEVICE)
        model = wrapped(which, module)
        for step in range(8):
            step_of(model, module, step)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        for step in range(8):
            step_of(model, module, step)
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        assert after["num_device_alloc"] == before["num_device_alloc"], which
        assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"], which


# -- graphs ------------------------------------------------------------------------------------------------------------


@beyond_the_stand_in("what is replayed there does nothing")
def check_a_step_in_a_cuda_graph() -> None:
    """Forward, backward with its reductions and the optimizer, captured, and replayed with other inputs."""
    if not ON_GPU:
        return
    for which in ("replicate", "replicate, small buckets"):
        for momentum in (0.0, 0.9):
            _captured(which, momentum)
        _captured(which, 0.9, elsewhere=True)


def _captured(which: str, momentum: float, *, elsewhere: bool = False) -> None:
    """`elsewhere`: in a stream that torch chooses, and not in that of the steps before."""
    module, reference = Towers().to(DEVICE), Towers().to(DEVICE)
    model = wrapped(which, module)
    batches = [data(0, step, 16, WIDTH) for step in range(14)]
    static = batches[0].clone()

    def step_on(used: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = used(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def optimizer_for(used: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(used.parameters(), lr=0.05, momentum=momentum, foreach=True)

    optimizer, plain = optimizer_for(module), optimizer_for(reference)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches[:7]:
            static.copy_(batch)
            step_on(model, static, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    assert reducer_of(model).arrivals.roll is not None
    graph = torch.cuda.CUDAGraph()
    static.copy_(batches[7])
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=None if elsewhere else side, capture_error_mode="thread_local"):
        loss = step_on(model, static, optimizer)
    assert reducer_of(model).arrivals.roll is not None
    losses = []
    for batch in batches[7:12]:
        static.copy_(batch)
        graph.replay()
        losses.append(loss.item())
    wanted = [step_on(reference, batch, plain).item() for batch in batches[:12]][7:]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    for (name, mine), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{which}, {name}: {text}", **CLOSE)
        torch.testing.assert_close(mine.grad, other.grad, **CLOSE)
    # And eagerly on, after the graph.
    for batch in batches[12:]:
        step_on(model, batch, optimizer)
        step_on(reference, batch, plain)
    for (name, mine), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{which}, later, {name}: {text}", **CLOSE)


def check_a_capture_that_cannot_be_is_told() -> None:
    """A weight has to be read on the host: an error that says so, and the module trains on."""
    if not ON_GPU:
        return
    module = Towers().to(DEVICE)
    model = wrapped("replicate", module)
    for step in range(6):
        step_of(model, module, step)
    torch.cuda.synchronize()
    batch = data(0, 0, 16, WIDTH)
    told: list[str] = []
    for parameter in module.parameters():
        parameter.grad = None
    px.weight(module, 3)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            model(batch).square().mean().backward()
    except Exception as error:  # that the capture is spoilt may be said after the cause, several times
        cause: BaseException | None = error
        while cause is not None:
            told.append(str(cause))
            cause = cause.__context__
    assert "cannot be captured in a CUDA graph" in " ".join(told), told
    torch.cuda.synchronize()


STREAMS = [
    check_the_default_stream,
    check_forward_and_backward_in_a_side_stream,
    check_branches_in_streams_of_their_own,
    check_streams_that_change,
    check_gradients_read_in_another_stream,
]
ALONE_CHECKS = [
    *STREAMS,
    check_no_host_wait_in_a_steady_step,
    check_no_memory_is_allocated_in_a_steady_step,
    check_a_step_in_a_cuda_graph,
    check_a_capture_that_cannot_be_is_told,
]


def test_alone_on_nccl() -> None:
    run_checks(ALONE_CHECKS, world_size=1, backend=ALONE)


def test_two_ranks_on_gloo() -> None:
    run_checks(STREAMS, world_size=2, backend="gloo")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(ALONE_CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(test_alone_on_nccl, test_two_ranks_on_gloo, test_two_ranks_on_nccl)
