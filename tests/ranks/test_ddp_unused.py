"""`find_unused_parameters`: what differs by rank and by step, and a rank where nothing is used at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches, Pair
from tests.ranks.replicas import assert_gradients, average_gradients, batch, mlp
from torch import nn

import phalanx as px
from phalanx.testing import ranks


def by_rank(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Another branch on each rank, swapped every third step; in every fourth none."""
    use = () if step % 4 == 3 else ((rank + step // 3) % 2,)
    return model(batch(rank, step), use).square().mean()


@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_branches_that_differ_by_rank_are_torchs_to_the_bit(view: bool) -> None:
    Pair.of(Branches, find_unused_parameters=True, gradient_as_bucket_view=view).train(by_rank, steps=12)


@ranks(2)
def test_gradients_that_are_kept_count_as_with_torch() -> None:
    """Zeroed in place, a gradient of an earlier step is there when its parameter is unused."""
    Pair.of(Branches, find_unused_parameters=True).train(by_rank, steps=12, set_to_none=False)


@ranks(3)
def test_three_ranks_and_two_branches() -> None:
    Pair.of(Branches, find_unused_parameters=True, bucket_cap_mb=0.0001).train(by_rank, steps=8, rtol=1e-6, atol=1e-7)


@ranks(2)
def test_what_no_rank_uses_keeps_no_gradient() -> None:
    pair = Pair.of(Branches, find_unused_parameters=True)
    for step in range(3):
        for model in pair.both():
            model.zero_grad()
            model(batch(dist.get_rank(), step), (0,)).sum().backward()
        assert pair.ours.module.branches[1].weight.grad is None
        pair.compare_gradients()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@ranks(2)
def test_a_rank_that_uses_nothing_joins_when_its_optimizer_steps(view: bool, set_to_none: bool) -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp(), find_unused_parameters=True, gradient_as_bucket_view=view)
    reference = mlp()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        output = model(batch(rank, step)).square().sum()
        if rank == 0 or step % 2:
            output.backward()
        optimizers[0].step()
        for r in range(2):
            if r == 0 or step % 2:
                (reference(batch(r, step)).square().sum() / 2).backward()
        optimizers[1].step()
        for mine, other in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


@ranks(2)
def test_two_optimizers_share_a_step() -> None:
    """The second one to step finds that the step was synchronised, and joins nothing."""
    model = px.DistributedDataParallel(Branches(), find_unused_parameters=True)
    first = torch.optim.SGD(model.module.stem.parameters(), lr=0.1)
    second = torch.optim.SGD(model.module.branches.parameters(), lr=0.1)
    for step in range(3):
        model.zero_grad()
        model(batch(dist.get_rank(), step), (step % 2,)).sum().backward()
        first.step()
        if dist.get_rank() == 0:  # on one rank alone: a collective here would find no partner
            second.step()


@ranks(2)
def test_a_step_of_the_optimizer_without_a_forward_joins_nothing() -> None:
    model = px.DistributedDataParallel(mlp(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        optimizer.step()
    model(batch(dist.get_rank())).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        optimizer.step()


@ranks(2)
def test_an_output_that_the_loss_leaves_out() -> None:
    """torch finds unused parameters by walking from the outputs and raises here; ours sees what arrives."""

    class Two(Branches):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            hidden = self.stem(x)
            return self.branches[0](hidden), self.branches[1](hidden)

    model = px.DistributedDataParallel(Two(), find_unused_parameters=True)
    reference = Two()

    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(batch(rank, step))[rank].square().sum()

    for step in range(3):
        model.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        assert_gradients(model.module, average_gradients(reference, loss, step))


@ranks(2)
def test_skip_all_reduce_unused_params() -> None:
    """Buckets that no parameter of this step is in are not reduced: gradients are torch's, in fewer collectives."""
    pair = Pair.of(
        Branches, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb_list=[0.0001] * 3
    )
    pair.train(lambda model, rank, step: model(batch(rank, step), (0,)).square().mean(), steps=4)
    data = pair.ours._get_ddp_logging_data()
    assert data["num_buckets_reduced"] < len(data["bucket_sizes"].split(","))
