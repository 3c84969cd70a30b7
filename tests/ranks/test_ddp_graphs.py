"""What graphs torch's contract allows: reused layers, checkpointing, several passes over one forward, and what it says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches, Pair, square_loss
from tests.ranks.replicas import assert_gradients, average_gradients, batch, flush_engine, mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.testing import ranks


class Reuses(nn.Module):
    """The middle layer is run twice, checkpointed or not."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.spare = nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(2):
            if self.reentrant is None:
                h = torch.tanh(self.middle(h))
            else:
                h = torch.tanh(checkpoint(self.middle, h, use_reentrant=self.reentrant))
        return self.last(h)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
@ranks(2)
def test_static_graph_with_a_reused_layer_and_an_unused_one(reentrant: bool | None, view: bool) -> None:
    pair = Pair.of(lambda: Reuses(reentrant=reentrant), static_graph=True, gradient_as_bucket_view=view)
    pair.train(square_loss, steps=6)


@ranks(2)
def test_static_graph_in_small_buckets() -> None:
    Pair.of(Reuses, static_graph=True, bucket_cap_mb=0.0002).train(square_loss, steps=6)


@ranks(2)
def test_static_graph_with_accumulation() -> None:
    def accumulated(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        with model.no_sync():
            square_loss(model, rank, 100 + step).backward()
        return square_loss(model, rank, step)

    pair = Pair.of(lambda: Reuses(reentrant=False), static_graph=True)
    pair.train(square_loss, steps=2)
    pair.train(accumulated, steps=3)


@ranks(2)
def test_reuse_without_reentrancy_needs_no_flag() -> None:
    """Autograd adds up both uses before it hands the gradient over."""
    Pair.of(lambda: Reuses(reentrant=None), find_unused_parameters=True).train(square_loss, steps=3)


@ranks(2)
def test_a_layer_checkpointed_twice_says_torchs_sentence_on_every_rank() -> None:
    model = px.DistributedDataParallel(Reuses(reentrant=True), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="Expected to mark a variable ready only once") as caught:
        model(batch(dist.get_rank())).sum().backward()
    assert "middle" in str(caught.value)
    assert "Expected to mark a variable ready only once" in model._get_ddp_logging_data()["error"]
    flush_engine()


@ranks(2)
def test_two_forwards_before_one_backward() -> None:
    """Each parameter is marked once: autograd adds up what both forwards bring."""

    def twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return square_loss(model, rank, step) + square_loss(model, rank, 50 + step)

    Pair.of(mlp).train(twice, steps=5)


@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_a_second_pass_over_one_forward_stays_local(view: bool) -> None:
    """torch's contract: one synchronised pass per forward; a further one adds what it brings to this rank's average."""
    rank = dist.get_rank()
    pair = Pair.of(mlp, gradient_as_bucket_view=view)
    for step in range(3):
        for model in pair.both():
            model.zero_grad()
            loss = square_loss(model, rank, step)
            loss.backward(retain_graph=True)
            loss.backward()
        pair.compare_gradients(f"in step {step}")


@ranks(2)
def test_two_passes_complete_one_step() -> None:
    """A pass that reaches a part of the model leaves the step open; the next one, over other outputs, completes it."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.left(x), self.right(x)

    rank = dist.get_rank()
    pair = Pair.of(Halves)
    for step in range(4):
        for model in pair.both():
            model.zero_grad()
            left, right = model(batch(rank, step))
            left.square().sum().backward()
            right.square().sum().backward()
            model._check_reducer_finalized()
        pair.compare_gradients(f"in step {step}")


@ranks(2)
def test_unused_found_in_each_of_two_passes() -> None:
    """With unused parameters looked for, both passes over one forward synchronise what they bring."""
    rank = dist.get_rank()
    model = px.DistributedDataParallel(Branches(), find_unused_parameters=True)
    reference = Branches()

    def losses(m: nn.Module, r: int, step: int) -> list[torch.Tensor]:
        x = batch(r, step)
        return [m(x, (0,)).sum(), m(x, (1,)).sum()]

    for step in range(3):
        model.zero_grad()
        for loss in losses(model, rank, step):
            loss.backward()
        expected = average_gradients(reference, lambda m, r, s: sum(losses(m, r, s)), step)
        assert_gradients(model.module, expected)


@ranks(2)
def test_gradients_with_respect_to_inputs_need_no_partner() -> None:
    """`autograd.grad` accumulates nothing into parameters: nothing is reduced, and the step stays whole."""
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for step in range(3):
        for model in pair.both():
            model.zero_grad()
            x = batch(rank, step).requires_grad_()
            loss = model(x).square().sum()
            if rank == 0:
                assert torch.autograd.grad(loss, x, retain_graph=True)[0].shape == x.shape
            loss.backward()
        pair.compare_gradients(f"in step {step}")


@ranks(2)
def test_double_backward_through_a_penalty() -> None:
    def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum() + model.module[-1].bias.sum()

    Pair.of(mlp).train(penalty, steps=3)


@ranks(2)
def test_a_static_graph_that_changes_is_told_on_every_rank() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(Branches(), static_graph=True)
    model(batch(rank, 0), (0,)).sum().backward()
    with pytest.raises(RuntimeError, match="Your training graph has changed in this iteration") as caught:
        model(batch(rank, 1), (0, 1)).sum().backward()
    assert "branches.1" in str(caught.value)
    flush_engine()


@ranks(2)
def test_a_static_graph_that_loses_a_parameter_is_told_by_the_next_forward() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(Branches(), static_graph=True)
    model(batch(rank, 0), (0, 1)).sum().backward()
    model(batch(rank, 1), (0,)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration") as caught:
        model(batch(rank, 2))
    assert "branches.1.weight" in str(caught.value) and "static_graph" in str(caught.value)


@ranks(2)
def test_set_static_graph_after_training_began_is_refused() -> None:
    model = px.DistributedDataParallel(mlp())
    model(batch(dist.get_rank())).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()


@pytest.mark.parametrize("find_unused", [False, True])
@ranks(2)
def test_tied_weights(find_unused: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, 6)
            self.decode.weight = self.encode.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decode(torch.tanh(self.encode(x)))

    Pair.of(Tied, find_unused_parameters=find_unused).train(square_loss, steps=4)
