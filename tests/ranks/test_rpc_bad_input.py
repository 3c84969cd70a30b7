"""DDP and distributed autograd, used wrongly: an error that says so, on every rank, and nobody waits for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from tests.ranks.replicas import average_gradients, mlp, plain_loss
from tests.ranks.rpc_workers import alike, in_context, refusal, worker
from torch import nn

import phalanx as px
from phalanx.errors import PeerFailedError, ReducerStateError
from phalanx.testing import run_ranks

TWO = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


def _still_trains(model: nn.Module, rank: int, step: int) -> None:
    expected = average_gradients(mlp(), plain_loss, step)
    mine = in_context(model, lambda m: plain_loss(m, rank, step))
    alike({n.removeprefix("module."): g for n, g in mine.items()}, _present(expected), rtol=1e-4, atol=1e-5)


def _present(gradients: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: gradient for name, gradient in gradients.items() if gradient is not None}


@TWO
def test_forward_and_backward_in_different_places(backend: str, tmp_path: Any) -> None:
    run_ranks(_different_places, 2, str(tmp_path), backend=backend)


def _different_places(folder: str) -> None:
    with worker(folder) as rank:
        model = px.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)

        def forward_in_backward_out() -> None:
            with dist_autograd.context():
                plain_loss(model, rank, 0).backward()

        with pytest.raises(ReducerStateError, match="outside of the context of distributed autograd in which"):
            forward_in_backward_out()
        model.zero_grad()
        _still_trains(model, rank, 1)

        def forward_out_backward_in() -> None:
            loss = plain_loss(model, rank, 2)
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [loss])

        assert "runs in a context of distributed autograd, and the forward pass did not" in refusal(
            forward_out_backward_in
        )
        _still_trains(model, rank, 3)

        def twice() -> None:
            with dist_autograd.context() as context:
                loss = plain_loss(model, rank, 4)
                dist_autograd.backward(context, [loss], retain_graph=True)
                dist_autograd.backward(context, [loss])

        assert "a second backward pass in one context" in refusal(twice)
        _still_trains(model, rank, 5)

        # What is no mistake: the module within, in a context of its own, is nobody's business but this rank's.
        in_context(model.module, lambda m: plain_loss(m, rank, 6 + rank))
        _still_trains(model, rank, 7)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.used, self.spare = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.used(x) + self.spare(x) if both else self.used(x)


@TWO
def test_a_parameter_without_a_gradient_is_named(backend: str, tmp_path: Any) -> None:
    run_ranks(_missing, 2, str(tmp_path), backend=backend)


def _missing(folder: str) -> None:
    with worker(folder) as rank:
        model = px.DistributedDataParallel(Half())
        x = torch.ones(2, 6)
        said = refusal(lambda: in_context(model, lambda m: m(x, both=rank == 0).sum()))
        wanted = "rank 1 got not all gradients" if rank == 0 else "no gradient for 2 of 4 parameters"
        assert wanted in said, said
        assert rank == 0 or "spare.weight" in said
        assert len(in_context(model, lambda m: m(x, both=True).sum())) == 4


@TWO
def test_one_rank_in_a_context_and_one_outside(backend: str, tmp_path: Any) -> None:
    run_ranks(_apart, 2, str(tmp_path), backend=backend)


def _apart(folder: str) -> None:
    with worker(folder, graceful=False) as rank:
        model = px.DistributedDataParallel(mlp())
        _still_trains(model, rank, 0)
        dist.barrier()
        if rank == 0:
            said = refusal(lambda: in_context(model, lambda m: plain_loss(m, rank, 1)))
            assert "rank 1 is in a backward pass outside of any context" in said, said
        else:
            with pytest.raises(PeerFailedError, match=r"rank 0 failed: it is in a backward pass .* within a context"):
                plain_loss(model, rank, 1).backward()
        assert "context" in refusal(lambda: in_context(model, lambda m: plain_loss(m, rank, 2)))


def test_the_first_forward_is_in_a_context_on_one_rank_only(tmp_path: Any) -> None:
    run_ranks(_apart_at_first, 2, str(tmp_path))


def _apart_at_first(folder: str) -> None:
    with worker(folder, graceful=False) as rank:
        model = px.DistributedDataParallel(mlp())
        if rank == 0:
            said = refusal(lambda: in_context(model, lambda m: plain_loss(m, rank, 1)))
            assert "rank 1 is in a backward pass outside of any context" in said, said
        else:
            with pytest.raises(PeerFailedError, match=r"rank 0 failed: it is in a backward pass .* within a context"):
                plain_loss(model, rank, 1).backward()


def test_one_rank_runs_fewer_passes_and_leaves(tmp_path: Any) -> None:
    run_ranks(_fewer, 2, str(tmp_path))


def _fewer(folder: str) -> None:
    with worker(folder) as rank:
        model = px.DistributedDataParallel(mlp())
        _still_trains(model, rank, 0)
        if rank == 0:
            said = refusal(lambda: in_context(model, lambda m: plain_loss(m, rank, 1)))
            assert "rank 1 is in rpc.shutdown()" in said, said


def test_contexts_in_another_order(tmp_path: Any) -> None:
    run_ranks(_other_order, 2, str(tmp_path))


def _other_order(folder: str) -> None:
    with worker(folder, graceful=False) as rank:
        model = px.DistributedDataParallel(mlp())
        forward_over = [threading.Event(), threading.Event()]
        first_over = threading.Event()
        said: dict[int, str] = {}

        def run(number: int) -> None:
            with dist_autograd.context() as context:
                if number == 1:
                    forward_over[0].wait()
                loss = plain_loss(model, rank, number)
                forward_over[number].set()
                if number != rank:  # rank 0 begins with the first, rank 1 with the second
                    first_over.wait()
                forward_over[1].wait()
                said[number] = refusal(lambda: dist_autograd.backward(context, [loss]))
                first_over.set()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for text in said.values():
            assert "rank 0 at number 1 of its open ones, rank 1 at number 2" in text, text
        assert len(said) == 2
