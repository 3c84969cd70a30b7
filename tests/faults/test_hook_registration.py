"""`register_hook`: ranks agree on it, and a hook that fails on one rank is told on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import flush_engine, mlp, plain_loss
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

import phalanx as px
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.testing import run_ranks

both_backends = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def raising(state: Any, bucket: Any) -> Any:
    raise KeyError("a hook's own error")


WRONG = {
    "no future": (lambda s, b: b.buffer(), TypeError, "must return a torch.futures.Future"),
    "no tensor": (lambda s, b: done("text"), TypeError, "must give a tensor like"),
    "too short": (lambda s, b: done(b.buffer()[:-1]), ValueError, "must give a tensor of"),
    "raises": (raising, KeyError, "a hook's own error"),
}


def fails_on_one_rank() -> None:
    rank = dist.get_rank()
    for what, (wrong, kind, text) in WRONG.items():
        model = px.replicate(mlp())
        group = dist.new_group()

        def mixed(state: Any, bucket: Any, wrong: Any = wrong) -> Any:
            return wrong(None, bucket) if rank == 1 else default_hooks.allreduce_hook(state, bucket)

        px.register_hook(model, mixed, state=group)
        expected = (kind, text) if rank == 1 else (PeerFailedError, "rank 1")
        with pytest.raises(expected[0], match=expected[1]) as caught:
            plain_loss(model, rank, 0).backward()
        assert rank == 1 or caught.value.failed_ranks == (1,), what
        del caught
        flush_engine()


@both_backends
def test_a_hook_of_a_replicated_module_that_fails_on_one_rank(backend: str) -> None:
    why = "collectives of the hook stay open on the ranks that did not fail"
    run_ranks(fails_on_one_rank, 2, backend=backend, timeout_s=25, allow_leaks=why)


def registration() -> None:
    odd = dist.get_rank() == 1
    model = px.replicate(mlp())
    with pytest.raises(TypeError if odd else PeerFailedError, match="must be callable"):
        px.register_hook(model, 1 if odd else debugging_hooks.noop_hook)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=r"different communication hooks: .*noop_hook"):
        px.register_hook(model, debugging_hooks.noop_hook if odd else default_hooks.allreduce_hook)
    px.register_hook(model, default_hooks.allreduce_hook, state=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="has the communication hook allreduce_hook already"):
        px.register_hook(model, debugging_hooks.noop_hook)
    with pytest.raises(ValueError, match="not replicated"):
        px.register_hook(mlp(), debugging_hooks.noop_hook)
    plain_loss(model, dist.get_rank(), 0).backward()
    px.unreplicate(model)
    px.replicate(model)
    px.register_hook(model, debugging_hooks.noop_hook)  # the old one went with the replica
    ddp = px.DistributedDataParallel(mlp())
    px.register_hook(ddp, debugging_hooks.noop_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)


@both_backends
def test_ranks_agree_on_a_hook(backend: str) -> None:
    run_ranks(registration, 2, backend=backend, timeout_s=20)
