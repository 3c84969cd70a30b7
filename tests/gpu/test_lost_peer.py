"""A rank on NCCL whose peer is gone, or has failed in a hook: its device waits in vain, and so would its script.

Every script reads its loss, which waits within CUDA where nobody can wake it. On the stand-in only, or on several GPUs.

    PYTHONPATH=src python tests/gpu/test_lost_peer.py
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import DEVICE, data, device_ids, gpu, main, several_gpus

import phalanx as px
from phalanx.comm.c10d import group_of
from phalanx.data import gather
from phalanx.errors import PeerFailedError, PeerLostError, PhalanxError
from phalanx.optim import averaging

pytestmark = gpu

# Two seconds until it is missed, four or seven where it is alive and has failed. NCCL's own time-out is 300 here.
WITHIN_S = 12.0
ENDS_WITHIN_S = 60.0
LEARNT = 6  # steps

Wrap = Callable[[nn.Module], nn.Module]


def replicated(model: nn.Module) -> nn.Module:
    return px.replicate(model)


def ddp(model: nn.Module) -> nn.Module:
    return px.DistributedDataParallel(model, device_ids=device_ids())


def train(model: nn.Module, *, steps: int, rank: int, begin: Callable[[int], None] = lambda step: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        begin(step)
        loss = model(data(rank, step, 4, 8)).square().mean()
        loss.item()
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)


def with_buffers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).to(DEVICE)


def meets(kind: type[PhalanxError], *said: str, train: Callable[[], None]) -> None:
    """The rank that goes on: what it is told, and when."""
    began = time.monotonic()
    try:
        train()
    except kind as error:
        took = time.monotonic() - began
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        missing = [part for part in said if part not in text]
        assert not missing, f"{missing} not said: {text}"
        assert took < WITHIN_S, f"after {took:.1f} s: {text}"
    else:
        raise AssertionError("it was told nothing")


# -- what happens: each runs in ranks of its own -----------------------------------------------------------------------


def survivor(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> nn.Module:
    """The model of the rank that goes on, when the other was killed without a word and it was told."""
    model = wrap(make())
    train(model, steps=LEARNT, rank=rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    meets(PeerLostError, "rank 1", train=lambda: train(model, steps=3, rank=rank))
    return model


def killed_in_forward(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    survivor(rank, wrap, make)
    torch.cuda.synchronize()  # the device goes on
    px.shutdown()


def killed_in_backward(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    """When some of its gradients have come."""
    model = wrap(make())
    train(model, steps=LEARNT, rank=rank)
    if rank == 1:
        first = next(model.parameters())
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    meets(PeerLostError, "rank 1", train=lambda: train(model, steps=3, rank=rank))
    torch.cuda.synchronize()


def logs_its_loss(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    """The text of a record is made under the lock of logging: nobody else can log while the device is waited for."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    model = wrap(make())
    train(model, steps=LEARNT, rank=rank)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        for step in range(3):
            loss = model(data(rank, step, 4, 8)).square().mean()
            loss.backward()
            logging.info("loss %.4f", loss)
            model.zero_grad()

    meets(PeerLostError, "rank 1", train=go_on)


def killed_between(rank: int, model: nn.Module, use: Callable[[], torch.Tensor], *, module: object, name: str) -> None:
    """When ranks have agreed what they are about to send: the other has no part in it."""
    train(model, steps=LEARNT, rank=rank)
    if rank == 1:
        setattr(module, name, lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL))

    def go_on() -> None:
        use().sum().item()
        train(model, steps=2, rank=rank)

    meets(PeerLostError, "rank 1", train=go_on)


def killed_in_average(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    model = wrap(make())

    def average() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        averaging.average_parameters(model.parameters(), group_of(dist.group.WORLD), setting="a test")
        return next(model.parameters())

    killed_between(rank, model, average, module=averaging, name="_packed")


def killed_in_gather(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    def rows() -> torch.Tensor:
        gathered = px.gather_exact(torch.ones(3, 4, device=DEVICE))
        assert isinstance(gathered, torch.Tensor)
        return gathered

    killed_between(rank, wrap(make()), rows, module=gather, name="_gathered")


def leaves_with_an_exception(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    """It says why: in forward, where its peers wait for nothing yet."""
    model = wrap(make())
    train(model, steps=LEARNT, rank=rank)
    if rank == 1:
        error = ValueError("no such file: shard-17.bin")
        sys.excepthook(type(error), error, None)
        os._exit(1)
    meets(PeerLostError, "rank 1 left", "shard-17.bin", train=lambda: train(model, steps=3, rank=rank))
    torch.cuda.synchronize()


def hook_fails(rank: int, wrap: Wrap, make: Callable[[], nn.Module], learnt: int = LEARNT) -> None:
    """On one rank, which is well otherwise: what it should have sent never comes."""
    model = wrap(make())
    fails: list[bool] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails:
            raise ValueError("not this bucket")
        tensor = bucket.buffer().div_(2)
        work = dist.all_reduce(tensor, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    px.register_hook(model, hook)
    train(model, steps=learnt, rank=rank)
    if rank == 0:
        meets(PeerFailedError, "rank 1", "not this bucket", train=lambda: train(model, steps=3, rank=rank))
    else:
        fails.append(True)
        with contextlib.suppress(ValueError):
            train(model, steps=1, rank=rank)
            raise AssertionError("the hook did not fail")
    began = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - began < WITHIN_S
    fails.clear()
    # It cannot be used on, on either rank, and says so.
    meets(PhalanxError, train=lambda: train(model, steps=1, rank=rank))


def hook_fails_at_once(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    """In the second step, of which all ranks read at once what the others say."""
    hook_fails(rank, wrap, make, learnt=1)


def casts_alone(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    """One rank's parameters change, which it says where others do not wait: it has no part in their step."""
    model = wrap(make())
    train(model, steps=LEARNT, rank=rank)
    if rank == 0:
        said = ("rank 1 failed", "its parameters changed, and not here: 0.weight is")
        meets(PeerFailedError, *said, train=lambda: train(model, steps=3, rank=rank))
    else:
        model.double()
        loss = model(data(rank, 9, 4, 8, dtype=torch.float64)).square().mean()
        meets(PeerFailedError, "rank 0 failed", train=loss.backward)
    torch.cuda.synchronize()


def goes_on_alone(rank: int, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    """The survivor leaves the job, and trains on by itself."""
    model = px.unreplicate(survivor(rank, wrap, make))
    px.shutdown()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    px.init()
    train(px.replicate(model), steps=3, rank=rank)
    px.shutdown()


# -- running -----------------------------------------------------------------------------------------------------------

Story = Callable[[int, Wrap, Callable[[], nn.Module]], None]


def _rank(rank: int, backend: str, folder: str, story: Story, wrap: Wrap, make: Callable[[], nn.Module]) -> None:
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    faulthandler.dump_traceback_later(ENDS_WITHIN_S - 5, exit=True)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    outcome: Any = "ok"
    try:
        story(rank, wrap, make)
    except BaseException as error:
        import traceback

        outcome = "".join(traceback.format_exception(error))
    Path(f"{folder}/{rank}").write_bytes(pickle.dumps(outcome))
    os._exit(0)  # what a group that was broken off needs to end is not what is tested here


def tell(
    story: Story, wrap: Wrap, make: Callable[[], nn.Module] = small, *, backend: str = "nccl", dies: bool = True
) -> None:
    """In two fresh processes, of which the second may die."""
    os.environ["STAND_IN_PATIENCE_S"] = "1"  # who does not come within that time is not waited for on the host
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.start_processes(
            _rank, (backend, folder, story, wrap, make), nprocs=2, start_method="spawn", join=False
        ).processes
        until = time.monotonic() + ENDS_WITHIN_S
        try:
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
            for rank in (0,) if dies else (0, 1):
                file = Path(f"{folder}/{rank}")
                assert file.exists(), f"rank {rank} did not come to its end ({processes[rank].exitcode})"
                outcome = pickle.loads(file.read_bytes())
                assert outcome == "ok", f"rank {rank}: {outcome}"
        finally:
            os.environ.pop("STAND_IN_PATIENCE_S")
            for process in processes:
                process.kill()


@several_gpus
def test_a_peer_that_is_killed() -> None:
    for wrap in (replicated, ddp):
        tell(killed_in_forward, wrap)
        tell(killed_in_backward, wrap)
    tell(killed_in_forward, replicated, backend="phalanx")


@several_gpus
def test_a_peer_that_is_killed_where_buffers_are_sent_first() -> None:
    for wrap in (replicated, ddp):
        tell(killed_in_forward, wrap, with_buffers)


@several_gpus
def test_a_peer_that_is_killed_while_others_wait_elsewhere() -> None:
    for story in (logs_its_loss, killed_in_average, killed_in_gather):
        tell(story, replicated)


@several_gpus
def test_a_peer_that_says_why_it_leaves() -> None:
    for wrap in (replicated, ddp):
        tell(leaves_with_an_exception, wrap)


@several_gpus
def test_a_hook_that_fails_on_one_rank() -> None:
    for wrap in (replicated, ddp):
        tell(hook_fails, wrap, dies=False)
        tell(hook_fails_at_once, wrap, dies=False)


@several_gpus
def test_parameters_that_change_on_one_rank() -> None:
    tell(casts_alone, replicated, dies=False)


@several_gpus
def test_the_survivor_goes_on() -> None:
    tell(goes_on_alone, replicated)


if __name__ == "__main__":
    main(
        test_a_peer_that_is_killed,
        test_a_peer_that_is_killed_where_buffers_are_sent_first,
        test_a_peer_that_is_killed_while_others_wait_elsewhere,
        test_a_peer_that_says_why_it_leaves,
        test_a_hook_that_fails_on_one_rank,
        test_parameters_that_change_on_one_rank,
        test_the_survivor_goes_on,
    )
