"""Bad input and bad luck: each a clear error on every rank within seconds, and nothing left running."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, batch, check_steps, flush_engine, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.errors import (
    GroupAbortedError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    PhalanxError,
    ReducerStateError,
)
from phalanx.testing import ranks

DEAD = "a rank is killed: what it held goes with it, and the survivors' group is broken"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# -- models that differ ----------------------------------------------------------------------------------------------


def differing(rank: int, how: str) -> nn.Module:
    odd = rank == 1
    match how:
        case "name":
            return nn.ModuleDict({"first": nn.Linear(3, 3), "odd" if odd else "even": nn.Linear(3, 3)})
        case "shape":
            return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5 if odd else 4))
        case "dtype":
            return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4).to(torch.float64 if odd else torch.float32))
        case "count":
            return nn.Sequential(*[nn.Linear(3, 3) for _ in range(3 if odd else 2)])
        case "strides":
            layer = nn.Conv2d(2, 2, 2)
            return layer.to(memory_format=torch.channels_last) if odd else layer
        case "trained":
            return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4).requires_grad_(not odd))
        case "buffer":
            return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=not odd))
        case _:
            raise AssertionError(how)


SIDES = {
    "name": (r"even\.weight", r"odd\.weight"),
    "shape": (r"1\.weight.*\[4, 3\]", r"1\.weight.*\[5, 3\]"),
    "dtype": (r"1\.weight.*torch\.float32", r"1\.weight.*torch\.float64"),
    "count": (r"4 (tensors|there)", r"6 (tensors|there).*only (here|there) is 2\.weight"),
    "strides": (r"weight.*strides \[8, 4, 2, 1\]", r"weight.*strides \[8, 1, 4, 2\]"),
    "trained": (r"1\.weight", r"frozen"),
    "buffer": (r"1\.running_mean", r"tensors here"),
}


@pytest.mark.parametrize("how", list(SIDES))
@ranks(3, timeout_s=20)
def test_different_models_name_the_first_difference_and_both_sides(how: str) -> None:
    with within(5), pytest.raises(MismatchError) as caught:
        px.replicate(differing(dist.get_rank(), how))
    text = str(caught.value)
    assert dist.get_rank() == caught.value.rank
    for side in SIDES[how]:
        assert re.search(side, text)
    model = px.replicate(mlp(), **SMALL)  # the group is still good
    plain_loss(model, dist.get_rank(), 0).backward()


# -- one rank's own problem is told to all ---------------------------------------------------------------------------


def problematic(what: str) -> nn.Module:
    match what:
        case "nothing to train":
            return nn.Linear(2, 2).requires_grad_(False)
        case "no parameters":
            return nn.ReLU()
        case "meta device":
            return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        case "lazy":
            return nn.Sequential(nn.LazyLinear(2))
        case "already replicated":
            return px.replicate(nn.Linear(2, 2))
        case "part already replicated":
            return nn.Sequential(px.replicate(nn.Linear(2, 2)))
        case _:
            raise AssertionError(what)


TEXTS = {
    "nothing to train": "no parameter that requires a gradient",
    "no parameters": "no parameter that requires a gradient",
    "meta device": r"1\.weight is on the meta device",
    "lazy": r"0\.weight is not initialised yet",
    "already replicated": "weight is already replicated, as part of this module",
    "part already replicated": r"0\.weight is already replicated, as part of a Linear",
}


@pytest.mark.parametrize("what", list(TEXTS))
@ranks(2, timeout_s=20)
def test_a_module_that_cannot_be_replicated(what: str) -> None:
    module = problematic(what)
    with within(5), pytest.raises(ValueError, match=TEXTS[what]):
        px.replicate(module)


@pytest.mark.parametrize("what", ["nothing to train", "meta device", "lazy"])
@ranks(3, timeout_s=20)
def test_a_problem_of_one_rank_alone_is_an_error_on_every_rank(what: str) -> None:
    rank = dist.get_rank()
    module = problematic(what) if rank == 2 else nn.Linear(2, 2)
    with within(5), pytest.raises(ValueError if rank == 2 else PeerFailedError, match=TEXTS[what]) as caught:
        px.replicate(module)
    if rank != 2:
        assert caught.value.failed_ranks == (2,)
    px.replicate(nn.Linear(2, 2))  # and the ranks are still in step


@ranks(1, backend=None, timeout_s=20)
def test_no_process_group() -> None:
    with within(2), pytest.raises(RuntimeError, match=r"call phalanx\.init\(\)"):
        px.replicate(mlp())


@ranks(1, timeout_s=20)
def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got list"):
        px.replicate([nn.Linear(2, 2)])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="absent"):
        px.replicate(mlp(), ignore=["absent"])
    with pytest.raises(ValueError, match="positive"):
        px.replicate(mlp(), bucket_bytes=0)
    with pytest.raises(ValueError, match="not replicated"), px.no_sync(mlp()):
        pass
    inner = px.replicate(mlp())
    with pytest.raises(ValueError, match="its submodule 0 is"):
        px.synchronize(nn.Sequential(inner))


@ranks(2, timeout_s=20)
def test_parameters_added_after_wrapping() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    plain_loss(model, rank, 0).backward()
    model.register_parameter("extra", nn.Parameter(torch.ones(2)))
    with within(5), pytest.raises(ReducerStateError, match="extra was added after replicate"):
        (plain_loss(model, rank, 1) * model.extra.sum()).backward()


# -- exceptions on one rank alone ------------------------------------------------------------------------------------


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ArithmeticError("this backward fails")


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_an_exception_in_backward_on_one_rank_alone(layer: int, world: int) -> None:
    @ranks(world, timeout_s=20)
    def body(layer: int) -> None:
        rank = dist.get_rank()
        model, reference = px.replicate(mlp(), **SMALL), mlp()
        for round_ in range(3):
            h = batch(rank)
            for number, part in enumerate(model):
                h = part(h)
                if rank == 1 and number == layer:
                    h = FailsInBackward.apply(h)
            with within(3), pytest.raises(ArithmeticError if rank == 1 else PeerFailedError) as caught:
                h.square().sum().backward()
            if rank != 1:
                assert caught.value.failed_ranks == (1,)
                assert "rank 1 raised in its backward pass" in str(caught.value)
            del caught
            check_steps(model, reference, plain_loss, steps=1 + round_)  # all ranks train on

    body(layer)


@ranks(2, timeout_s=20)
def test_exceptions_in_backward_on_both_ranks_in_turn_and_together() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for failing in ({0}, {1}, {0, 1}, {0}):
        h = model[:3](batch(rank))
        if rank in failing:
            h = FailsInBackward.apply(h)
        with within(3), pytest.raises(ArithmeticError if rank in failing else PeerFailedError):
            model[3:](h).square().sum().backward()
        check_steps(model, reference, plain_loss, steps=2)


@ranks(2, timeout_s=20)
def test_an_exception_in_backward_before_any_gradient_is_as_one_in_forward() -> None:
    """Nothing of the module was reached: this rank's next pass takes its place in the step, and none is off by one."""
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for _ in range(2):
        if rank == 1:
            with pytest.raises(ArithmeticError):
                FailsInBackward.apply(model(batch(rank))).square().sum().backward()
        check_steps(model, reference, plain_loss, steps=2)


@ranks(2, timeout_s=20)
def test_an_exception_in_forward_that_is_caught_costs_the_others_nothing() -> None:
    """One that retries (out of memory, a bad sample) keeps its place: the others just wait for its backward."""
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        model.zero_grad()
        if rank == 1:
            with pytest.raises(RuntimeError):
                model(torch.randn(2, 99))
        check_steps(model, reference, plain_loss, steps=1)
        del step


@ranks(2, timeout_s=20)
def test_an_exception_in_forward_that_skips_the_step_is_made_up_for_by_the_optimizer() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        try:
            model(batch(rank) if rank == 0 else torch.randn(2, 99)).square().sum().backward()
        except RuntimeError:
            assert rank == 1
        optimizer.step()
    weights = [torch.empty_like(model[0].weight) for _ in range(2)]
    dist.all_gather(weights, model[0].weight.detach())
    assert torch.equal(*weights)


SCRIPT = textwrap.dedent("""
    import sys, torch, phalanx as px
    world = px.init(backend={backend!r})
    model = px.replicate(torch.nn.Linear(4, 4))
    for step in range(50):
        if world.rank == 1 and step == 3:
            {what}
        model(torch.randn(2, 4)).sum().backward()
    print("trained to the end")
""")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize(
    "what, told",
    [
        ('raise ArithmeticError("no such sample")', r"rank 1 (left|failed): ArithmeticError: no such sample"),
        ("model(torch.randn(2, 9))", r"rank 1 (left|failed): RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("sys.exit(3)", "rank 1"),
    ],
    ids=["raise", "forward", "exit"],
)
def test_a_rank_whose_script_ends_early_is_named_with_its_reason(
    what: str, told: str, backend: str, tmp_path: Path
) -> None:
    """As users meet it: whole processes, an exception that nobody catches, and the other rank in its backward."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(what=what, backend=backend))
    env = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_PORT": str(_free_port()), "RES_OPTIONS": "timeout:1 attempts:1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    started = [
        subprocess.Popen(
            [sys.executable, str(script)], env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        started[1].wait(40)
        ended = time.monotonic()
        _, survivor = started[0].communicate(timeout=15)
        assert time.monotonic() - ended < 5
    finally:
        for process in started:
            process.kill()
            process.communicate()
    text = survivor.decode()
    assert started[0].returncode == 1
    assert re.search(f"Peer(Lost|Failed)Error: .*{told}", text), text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- ranks that leave ------------------------------------------------------------------------------------------------


def leave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)


@pytest.mark.parametrize("how, code", [("kill", -9), ("exit", 3)])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("when", ["before", "middle"])
def test_a_rank_that_leaves_while_others_are_in_backward(how: str, code: int, world: int, when: str) -> None:
    @ranks(world, timeout_s=25, expect_exit={1: code}, allow_leaks=DEAD)
    def body(how: str, when: str) -> None:
        rank = dist.get_rank()
        model = px.replicate(mlp(), **SMALL)
        for step in range(3):
            plain_loss(model, rank, step).backward()
        if rank == 1:
            if when == "middle":  # the later layers' buckets have left, the rest never will
                model[0].weight.register_hook(lambda gradient: leave(how))
                plain_loss(model, rank, 3).backward()
            leave(how)
        # SystemExit out of a hook is first an error in backward, which rank 1 still tells its peers if it has the time.
        errors = (PeerLostError, PeerFailedError) if (how, when) == ("exit", "middle") else (PeerLostError,)
        with within(4), pytest.raises(errors) as caught:
            plain_loss(model, rank, 3).backward()
        if isinstance(caught.value, PeerFailedError):
            assert caught.value.failed_ranks == (1,)
            with within(4), pytest.raises(PeerLostError) as caught:  # and then it is gone
                plain_loss(model, rank, 4).backward()
        assert caught.value.lost_ranks == (1,)
        assert "rank 1" in str(caught.value)
        with within(1), pytest.raises(PhalanxError):  # nobody tries again on a broken group
            plain_loss(model, rank, 5).backward()

    body(how, when)


@ranks(3, timeout_s=25, expect_exit={2: -9}, allow_leaks=DEAD)
def test_a_rank_that_dies_before_it_comes_to_replicate() -> None:
    if dist.get_rank() == 2:
        px.replicate(nn.Linear(2, 2))
        os.kill(os.getpid(), signal.SIGKILL)
    px.replicate(nn.Linear(2, 2))
    with within(5), pytest.raises(PeerLostError) as caught:
        px.replicate(mlp())
    assert caught.value.lost_ranks == (2,)


@pytest.mark.parametrize("who", [0, 1])
@ranks(2, timeout_s=20, allow_leaks="an aborted Gloo group keeps its sockets until the process ends")
def test_abort_wakes_a_waiter(who: int) -> None:
    """Rank 1 waits for a step that rank 0 never begins; either of them aborts."""
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    plain_loss(model, rank, 0).backward()
    group = replica_of(model).group
    if rank == 0:
        if who == 0:
            group.abort("the operator said stop")
        dist.barrier()
        if who == 1:
            with suppress(GroupAbortedError):  # where rank 1 did its part in this step before it was told, it completes
                plain_loss(model, rank, 1).backward()
        with within(3), pytest.raises(GroupAbortedError, match="the operator said stop"):
            plain_loss(model, rank, 2).backward()
        flush_engine()
        return
    aborter = threading.Timer(0.3, group.abort, ["the operator said stop"])
    if who == 1:
        aborter.start()
    with within(1.5), pytest.raises(GroupAbortedError, match="the operator said stop"):
        plain_loss(model, rank, 1).backward()
    if who == 1:
        aborter.join()
    flush_engine()
    dist.barrier()
