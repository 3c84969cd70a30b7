"""`_update_process_group`: to a smaller group, a larger one and the default one, with right averages each time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import assert_gradients, batch, gradients, mlp, plain_loss
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import phalanx as px
from phalanx.testing import ranks


def check(model: px.DistributedDataParallel, members: list[int], *, steps: int = 3) -> None:
    """Gradients are the mean over the members: before and after the buckets are laid out anew."""
    reference = mlp()
    reference.load_state_dict(model.module.state_dict())
    for step in range(steps):
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
        reference.zero_grad()
        for rank in members:
            (plain_loss(reference, rank, step) / len(members)).backward()
        assert_gradients(model.module, gradients(reference))


OPTIONS = {
    "plain": {"bucket_cap_mb": 0.0002},
    "view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@ranks(4)
def test_smaller_larger_and_the_default_group(options: dict) -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    three = dist.new_group([0, 1, 2])
    model = px.DistributedDataParallel(mlp(), **options)
    check(model, [0, 1, 2, 3])
    model._update_process_group(pairs[rank // 2])
    check(model, [0, 1] if rank < 2 else [2, 3])
    model._update_process_group(three)
    if rank < 3:
        check(model, [0, 1, 2])
    model._update_process_group(dist.group.WORLD)
    check(model, [0, 1, 2, 3])


@ranks(4)
def test_after_an_exception_in_backward() -> None:
    """A rank is lost: the others go on without it, and later with it again."""
    rank = dist.get_rank()
    three = dist.new_group([0, 1, 2])
    model = px.DistributedDataParallel(mlp())
    check(model, [0, 1, 2, 3], steps=2)
    model.zero_grad()
    hidden: list[torch.Tensor] = []
    handle = model.module[2].register_forward_hook(lambda module, inputs, output: hidden.append(output))
    output = model(batch(rank))
    handle.remove()
    if rank == 3:
        hidden[0].register_hook(_raise)  # the last layer has its gradients by then
    with pytest.raises(KeyError if rank == 3 else px.errors.PeerFailedError):
        output.sum().backward()
    model._update_process_group(three)
    if rank < 3:
        check(model, [0, 1, 2])
    model._update_process_group(dist.group.WORLD)
    check(model, [0, 1, 2, 3])


@ranks(4)
def test_a_hook_follows_when_it_is_given_the_new_group() -> None:
    """As torch says: hooks hold their own group, which the user changes."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    current = {"group": dist.group.WORLD}

    def hook(state: dict, bucket):
        return default_hooks.allreduce_hook(state["group"], bucket)

    model = px.DistributedDataParallel(mlp())
    model.register_comm_hook(current, hook)
    check(model, [0, 1, 2, 3])
    current["group"] = pairs[rank // 2]
    model._update_process_group(pairs[rank // 2])
    check(model, [0, 1] if rank < 2 else [2, 3])


@ranks(2)
def test_buffers_follow_the_group() -> None:
    """Rank 0 of the new group is now the one whose buffers count."""
    alone = [dist.new_group([0]), dist.new_group([1])]
    torch.manual_seed(0)
    model = px.DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    model._update_process_group(alone[dist.get_rank()])
    model(batch(dist.get_rank())).sum().backward()
    model(batch(dist.get_rank())).sum().backward()
    means = [torch.empty(6) for _ in range(2)]
    dist.all_gather(means, model.module[1].running_mean)
    assert not torch.equal(*means)


def _raise(_: object) -> None:
    raise KeyError("on purpose")
