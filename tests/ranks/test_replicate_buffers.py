"""Buffers: once per step, out of place, never in eval mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, batch, equal_on_all_ranks
from torch import nn

import phalanx as px
from phalanx.testing import ranks


def norm_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def one_step(model: nn.Module, step: int = 0) -> None:
    model(batch(dist.get_rank(), step)).square().sum().backward()


def local_statistics(rank: int) -> nn.BatchNorm1d:
    """What one forward of that rank gives by itself."""
    twin = norm_net()
    twin(batch(rank))
    return twin[1]  # type: ignore[return-value]


@ranks(2)
def test_rank0_gives_its_own() -> None:
    model = px.replicate(norm_net(), **SMALL)
    one_step(model)
    torch.testing.assert_close(model[1].running_mean, local_statistics(0).running_mean)
    torch.testing.assert_close(model[1].running_var, local_statistics(0).running_var)


@ranks(3)
def test_mean_averages_what_floats_and_takes_rank_0s_counts() -> None:
    model = norm_net()
    px.replicate(model, buffers="mean", **SMALL)
    one_step(model)
    expected = sum(local_statistics(r).running_mean for r in range(3)) / 3
    torch.testing.assert_close(model[1].running_mean, expected)
    assert model[1].num_batches_tracked.item() == 1


@ranks(2)
def test_none_leaves_them_alone() -> None:
    model = px.replicate(norm_net(), buffers="none", **SMALL)
    one_step(model)
    torch.testing.assert_close(model[1].running_mean, local_statistics(dist.get_rank()).running_mean)


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@ranks(2)
def test_two_forwards_before_one_backward(policy: str) -> None:
    model = px.replicate(norm_net(), buffers=policy, **SMALL)
    for step in range(3):
        model.zero_grad()
        loss = model(batch(dist.get_rank(), step)).sum() + model(batch(dist.get_rank(), step + 9)).square().sum()
        model.eval()
        loss = loss + model(batch(dist.get_rank(), step + 5)).square().sum()  # its graph holds the running statistics
        model.train()
        loss.backward()
    assert equal_on_all_ranks(model[1].running_mean)


@ranks(2)
def test_a_graph_that_outlives_the_step_still_finds_its_buffers() -> None:
    model = px.replicate(norm_net(), **SMALL)
    model.eval()
    held = model(batch(dist.get_rank(), 7)).square().sum()  # saves the running statistics for its backward
    for buffer in model.buffers():
        buffer.requires_grad_(False)
    (model.train()[0].weight.sum() * 1.0).backward()  # a step in training mode, which replaces the buffers
    held.backward()
    assert equal_on_all_ranks(model[1].running_mean)


@ranks(2)
def test_never_in_eval_one_rank_alone_may_evaluate() -> None:
    model = px.replicate(norm_net(), **SMALL)
    one_step(model)
    model.eval()
    before = model[1].running_mean
    if dist.get_rank() == 1:
        for step in range(3):
            model(batch(1, step))
    one_step(model, 1)  # training on in eval mode, as fine-tuning does: buffers are not touched
    assert model[1].running_mean is before
    model.train()
    one_step(model, 2)
    assert equal_on_all_ranks(model[1].running_mean)


@ranks(2)
def test_a_forward_without_gradients_waits_for_nobody() -> None:
    model = px.replicate(norm_net(), **SMALL)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(batch(0))
    one_step(model)
    assert equal_on_all_ranks(model[1].running_var)


class Odd(nn.Module):
    """Buffers of many kinds, one of them under two names."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("tied", torch.full((2, 3), float(rank)))
        self.inner = nn.Module()
        self.inner.register_buffer("tied", self.tied)
        self.register_buffer("mask", torch.tensor([rank == 0, True]))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("absent", None)
        self.register_buffer("phase", torch.full((2,), complex(rank, 1)))
        self.register_buffer("turned", torch.full((3, 2), float(rank)).t())
        self.register_buffer("passing", torch.full((2,), rank, dtype=torch.uint8), persistent=False)


@ranks(2)
def test_every_kind_of_buffer_and_tied_ones_stay_tied() -> None:
    rank = dist.get_rank()
    model = Odd(rank)
    px.replicate(model)
    assert model.count.item() == 0  # rank 0's, from the beginning
    for name, buffer in model.named_buffers():
        if buffer.dtype is torch.bool:
            buffer.copy_(torch.tensor([rank == 0, True]))
        else:
            buffer.fill_(rank)
        del name
    held = model.tied
    (model.weight.sum() * 1.0).backward()
    assert model.inner.tied is model.tied
    assert model.mask.tolist() == [True, True]
    for name in ("tied", "count", "phase", "turned", "passing"):
        assert torch.equal(getattr(model, name), torch.zeros_like(getattr(model, name))), name
    assert model.turned.stride() == torch.empty(3, 2).t().stride()
    if rank == 1:
        assert held.eq(1).all()  # out of place: whoever holds the old one still has it


@ranks(2)
def test_ignored_buffers_and_parameters_stay_local() -> None:
    rank = dist.get_rank()
    model = norm_net()
    with torch.no_grad():
        model[2].bias.fill_(rank)
    px.replicate(model, ignore=["1.running_mean", "2.bias"], **SMALL)
    assert model[2].bias[0].item() == rank
    one_step(model)
    torch.testing.assert_close(model[1].running_mean, local_statistics(rank).running_mean, rtol=1e-2, atol=1e-2)
    assert equal_on_all_ranks(model[1].running_var)
    assert not equal_on_all_ranks(model[2].bias.grad)
    assert equal_on_all_ranks(model[2].weight.grad)


@ranks(1)
def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="rank0, mean, none"):
        px.replicate(norm_net(), buffers="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["rank0", "mean"])
@ranks(2)
def test_a_buffer_that_is_none_at_first_and_in_between(policy: str) -> None:
    model = norm_net()
    model.register_buffer("late", None)
    px.replicate(model, buffers=policy)
    expected = torch.full((2,), 1.0 if policy == "rank0" else 1.5)
    for _ in range(2):
        one_step(model)
        model.late = torch.full((2,), 1.0 + dist.get_rank())
        one_step(model)
        assert torch.equal(model.late, expected)
        model.late = None


@ranks(2)
def test_a_buffer_that_was_none_gives_way_to_another() -> None:
    model = norm_net()
    model.register_buffer("empty", None)
    px.replicate(model)
    one_step(model)
    del model.empty
    model.register_buffer("stat", torch.full((2,), 1.0 + dist.get_rank()))
    one_step(model)
    assert model.stat.tolist() == [1.0, 1.0]
