"""Gradient accumulation: `no_sync` and `accumulate`. What was kept is reduced by the next pass that synchronises."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, gradients, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.testing import ranks


def summed(*micro_steps: int):  # type: ignore[no-untyped-def]
    return lambda m, r, s: sum((plain_loss(m, r, 10 * s + i) for i in micro_steps), torch.zeros(()))


@ranks(2)
def test_no_sync_keeps_gradients_local_and_the_next_pass_reduces_all() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        model.zero_grad()
        with px.no_sync(model):
            plain_loss(model, rank, 10 * step).backward()
            plain_loss(model, rank, 10 * step + 1).backward()
        local = average_gradients(reference, lambda m, r, s: summed(0, 1)(m, rank, s), step, size=1)
        assert_gradients(model, local)
        plain_loss(model, rank, 10 * step + 2).backward()
        assert_gradients(model, average_gradients(reference, summed(0, 1, 2), step))


@ranks(2)
def test_decided_when_backward_runs_not_when_forward_did() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    loss = plain_loss(model, rank, 0)
    with px.no_sync(model):
        inside = plain_loss(model, rank, 1)
        loss.backward()
    assert px.step_stats(model).steps == 0
    inside.backward()
    assert px.step_stats(model).steps == 1
    assert_gradients(model, average_gradients(reference, summed(0, 1), 0))


@pytest.mark.parametrize("extra", [False, True])
@ranks(2)
def test_what_only_an_earlier_micro_batch_used_is_reduced_too(extra: bool) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()

    def part(m: nn.Sequential, r: int, s: int, which: int) -> torch.Tensor:
        return m[which](batch(r, s, width=6 if which == 0 else 8)).square().sum()

    for step in range(4):
        model.zero_grad()
        with px.no_sync(model):
            part(model, rank, step, 2).backward()
            if rank == 0:
                part(model, rank, step, 4).backward()  # on one rank alone
        part(model, rank, step, 0).backward()
        if extra:  # another synchronised pass must not reduce the same twice
            part(model, rank, step, 0).backward()

        def whole(m: nn.Module, r: int, s: int) -> torch.Tensor:
            value = part(m, r, s, 2) + part(m, r, s, 0) * (2 if extra else 1)
            return value + part(m, r, s, 4) if r == 0 else value

        assert_gradients(model, average_gradients(reference, whole, step))


@ranks(2)
def test_what_was_kept_and_thrown_away_is_not_reduced() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        with px.no_sync(model):
            plain_loss(model, rank, 50).backward()
        model.zero_grad()
        model[4](batch(rank, step, width=8)).square().sum().backward()
        expected = average_gradients(reference, lambda m, r, s: m[4](batch(r, s, width=8)).square().sum(), step)
        assert_gradients(model, expected)


@ranks(2)
def test_no_sync_nests() -> None:
    model = px.replicate(mlp(), **SMALL)
    with px.no_sync(model):
        with px.no_sync(model):
            plain_loss(model, dist.get_rank(), 0).backward()
        plain_loss(model, dist.get_rank(), 0).backward()
    assert px.step_stats(model).steps == 0
    assert px.step_stats(model).kept == 2


@ranks(2)
def test_an_exception_in_the_block_ends_it() -> None:
    model = px.replicate(mlp(), **SMALL)
    with pytest.raises(ArithmeticError), px.no_sync(model):
        raise ArithmeticError
    with pytest.raises(ArithmeticError), px.accumulate(model, 2):
        raise ArithmeticError
    plain_loss(model, dist.get_rank(), 0).backward()
    assert px.step_stats(model).steps == 1


@ranks(2)
def test_accumulate_synchronises_every_nth_pass() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with px.accumulate(model, 3):
        for step in range(2):
            optimizer.zero_grad()
            for i in range(3):
                assert px.step_stats(model).steps == step
                plain_loss(model, rank, 10 * step + i).backward()
            assert px.step_stats(model).steps == step + 1
            assert_gradients(model, average_gradients(reference, summed(0, 1, 2), step))
            optimizer.step()
    assert px.step_stats(model).steps == 2


@ranks(2)
def test_accumulate_synchronises_what_is_left_over_at_its_end() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    with px.accumulate(model, 3):
        for i in range(5):
            if i == 3:
                model.zero_grad()
            plain_loss(model, rank, i).backward()
    assert px.step_stats(model).steps == 2
    assert_gradients(model, average_gradients(reference, summed(3, 4), 0))


@ranks(2)
def test_an_optimizer_may_step_on_local_gradients_within_no_sync() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with px.no_sync(model):
        plain_loss(model, rank, 0).backward()
        before = gradients(model)
        optimizer.step()
    assert_gradients(model, before)


@pytest.mark.parametrize("n", [0, -1, 1.5])
@ranks(1)
def test_accumulate_checks_its_number(n: float) -> None:
    model = px.replicate(mlp())
    with pytest.raises(ValueError, match="at least 1"), px.accumulate(model, n):  # type: ignore[arg-type]
        pass
