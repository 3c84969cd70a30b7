"""The module changes after `replicate`: re-planned where that can be, else an error; never a silent loss of sync."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import (
    SMALL,
    assert_gradients,
    average_gradients,
    batch,
    check_steps,
    equal_on_all_ranks,
    flush_engine,
    gradients,
    mlp,
    plain_loss,
)
from torch import nn

import phalanx as px
from phalanx.errors import MismatchError, PeerFailedError, PhalanxError, ReducerStateError, UnsynchronizedStepError
from phalanx.testing import ranks, run_ranks


def typed_loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
    dtype = next(m.parameters()).dtype
    return m(batch(rank, step).to(dtype)).square().sum()


@pytest.mark.parametrize("keep_gradients", [True, False])
@ranks(2)
def test_a_cast_is_re_planned(keep_gradients: bool) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step, dtype in enumerate([torch.float32, torch.float64, torch.float64, torch.float32, torch.float32]):
        model.to(dtype)
        reference.to(dtype)
        if not keep_gradients:
            model.zero_grad()
            reference.zero_grad()
        typed_loss(model, rank, step).backward()
        for r in range(2):
            (typed_loss(reference, r, step) / 2).backward()
        assert_gradients(model, gradients(reference))


@ranks(2)
def test_cast_there_and_back_between_two_steps() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(4):
        plain_loss(model, rank, step).backward()
        for r in range(2):
            (plain_loss(reference, r, step) / 2).backward()
        assert_gradients(model, gradients(reference))
        model.double().float()  # a cast points parameters and gradients to new memory
        reference.double().float()


@ranks(2)
def test_data_pointed_elsewhere() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(4):
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.data = parameter.data.clone()


@ranks(2)
def test_another_memory_format() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))

    def loss(m: nn.Module, r: int, s: int) -> torch.Tensor:
        return m(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * s + r))).square().sum()

    model, reference = px.replicate(net(), **SMALL), net()
    check_steps(model, reference, loss, steps=2)
    model.to(memory_format=torch.channels_last)
    check_steps(model, reference, loss, steps=2)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("which", ["one", "all"])
@ranks(2)
def test_replaced_parameters_are_re_planned(which: str) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(5):
        if step == 2:
            for m in (model, reference):
                torch.manual_seed(7)
                if which == "one":
                    m[4] = nn.Linear(8, 2)  # a new head
                else:
                    for layer in (0, 2, 4):
                        m[layer] = nn.Linear(m[layer].in_features, m[layer].out_features)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.zero_grad()
        plain_loss(model, rank, step).backward()
        optimizer.step()  # where no parameter is left that Phalanx knows, this is where it finds out
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_swapped_by_an_assigning_load_state_dict() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    check_steps(model, reference, plain_loss, steps=2)
    other = mlp(5).state_dict()
    model.load_state_dict({k: v.clone() for k, v in other.items()}, assign=True)
    reference.load_state_dict(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        optimizer.zero_grad()
        plain_loss(model, rank, step).backward()
        optimizer.step()
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(3, timeout_s=20)
def test_a_cast_on_one_rank_alone_is_an_error_on_every_rank() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    plain_loss(model, rank, 0).backward()
    if rank == 1:
        model.double()
    began = time.monotonic()
    with pytest.raises(PhalanxError, match=r"4\.bias|parameters changed|called allocate"):
        typed_loss(model, rank, 1).backward()
    assert time.monotonic() - began < 5
    with pytest.raises(PhalanxError):
        typed_loss(model, rank, 2).backward()
    flush_engine()


@ranks(2, timeout_s=20)
def test_a_replacement_on_one_rank_alone_is_an_error_on_every_rank() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    plain_loss(model, rank, 0).backward()
    if rank == 1:
        model[4] = nn.Linear(8, 3)
    with pytest.raises(MismatchError, match=r"4\.weight"):
        plain_loss(model, rank, 1).backward()


@pytest.mark.parametrize("where", ["all", "rank 1"])
@ranks(2, timeout_s=20)
def test_added_parameters_are_an_error_on_every_rank(where: str) -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    plain_loss(model, rank, 0).backward()
    if where == "all" or rank == 1:
        model.append(nn.Linear(2, 2))
    mine = where == "all" or rank == 1
    with pytest.raises(ReducerStateError if mine else PeerFailedError, match=r"5\.weight was added"):
        plain_loss(model, rank, 1).backward()
    with pytest.raises(PhalanxError, match="added"):  # no rank is left waiting for the other
        plain_loss(model, rank, 2).backward()
    flush_engine()
    px.unreplicate(model)


@ranks(2)
def test_unreplicate_and_replicate_again_takes_in_what_was_added() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    check_steps(model, reference, plain_loss, steps=2)
    kept = gradients(model)
    px.unreplicate(model)
    assert not px.is_replicated(model)
    assert_gradients(model, kept)
    plain_loss(model, rank, 9).backward()  # local
    for m in (model, reference):
        torch.manual_seed(3)
        m.append(nn.Linear(2, 2))
    px.replicate(model, **SMALL)
    check_steps(model, reference, plain_loss)


@ranks(2, timeout_s=20)
def test_a_step_on_gradients_that_were_never_averaged() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    found = torch.autograd.grad(plain_loss(model, rank, 0), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    with pytest.raises(UnsynchronizedStepError, match="never averaged") as caught:
        optimizer.step()
    assert "0.weight" in caught.value.parameters
    assert torch.equal(before, model[0].weight)
    model.zero_grad()
    plain_loss(model, rank, 1).backward()  # no harm was done
    optimizer.step()
    assert equal_on_all_ranks(model[0].weight)


@ranks(2, timeout_s=20)
def test_a_step_on_gradients_that_one_rank_alone_did_not_average() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 1:
        model[0].weight.grad = torch.ones_like(model[0].weight)
        with pytest.raises(UnsynchronizedStepError):
            optimizer.step()
        return
    began = time.monotonic()
    with pytest.raises(PeerFailedError, match=r"rank 1 failed.*never averaged"):
        plain_loss(model, rank, 0).backward()
    assert time.monotonic() - began < 5


@ranks(2)
def test_synchronize_averages_gradients_from_elsewhere() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        found = torch.autograd.grad(plain_loss(model, rank, step), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        px.synchronize(model)
        reference.load_state_dict(model.state_dict())
        assert_gradients(model, average_gradients(reference, plain_loss, step))
        optimizer.step()


@ranks(2)
def test_two_optimizers_on_one_module() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()

    def optimizers(m: nn.Module) -> list[torch.optim.Optimizer]:
        first, *rest = m.parameters()
        return [torch.optim.SGD([first], lr=0.1), torch.optim.Adam(rest, lr=0.01)]

    mine, theirs = optimizers(model), optimizers(reference)
    for step in range(4):
        for optimizer in mine:
            optimizer.zero_grad()
        plain_loss(model, rank, step).backward()
        average_gradients(reference, plain_loss, step)
        for optimizer in (*mine, *theirs):
            optimizer.step()
        for ours, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted)
    assert px.step_stats(model).steps == 4  # nobody took part a second time


@ranks(2)
def test_an_optimizer_with_a_closure() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = typed_loss(model, rank, 0)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)  # the search compares losses: they must be the same everywhere, too
        return total

    optimizer.step(closure)
    optimizer.step(closure)
    assert equal_on_all_ranks(model[0].weight)


@ranks(2)
def test_an_optimizer_of_something_else_is_left_alone() -> None:
    model = px.replicate(mlp(), **SMALL)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        other(torch.ones(2)).sum().backward()
        optimizer.step()
    assert px.step_stats(model).steps == 0


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_parameter_replaced_on_one_rank_alone_is_an_error_on_all(backend: str) -> None:
    run_ranks(_replace_on_one_rank, 2, backend=backend)


def _replace_on_one_rank() -> None:
    torch.manual_seed(0)
    model = px.replicate(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    for _ in range(4):
        model(torch.ones(2, 3)).sum().backward()
    if dist.get_rank() == 1:  # by an equal one: comparing the models shows no difference
        model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(px.errors.ReducerStateError, match=r"0.weight was replaced or unfrozen on ranks \[1\]"):
        model(torch.ones(2, 3)).sum().backward()
