"""A wrapped model is freed when its user lets go of it, whatever happened to it before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Branches, square_loss
from tests.ranks.replicas import batch, flush_engine, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import phalanx as px
from phalanx.testing import ranks


def freed(model: px.DistributedDataParallel, *more: object) -> list[weakref.ref]:
    parts = [model, model.module, model._engine, *model.module.parameters(), *more]
    return [weakref.ref(part) for part in parts]


def assert_freed(references: list[weakref.ref]) -> None:
    gc.collect()
    gc.collect()  # what only freed parameters' hooks led to
    left = [type(reference()).__name__ for reference in references if reference() is not None]
    assert left == []


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["plain", "view", "unused", "static"],
)
@ranks(2)
def test_after_training(options: dict) -> None:
    model = px.DistributedDataParallel(mlp(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        square_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    references = freed(model)
    del model, optimizer
    assert_freed(references)


@ranks(2)
def test_before_training() -> None:
    model = px.DistributedDataParallel(BatchNormNet())
    references = freed(model)
    del model
    assert_freed(references)


@ranks(2)
def test_with_a_hook_whose_state_is_the_model() -> None:
    """With torch this is a circle through C++ that nobody can see."""
    model = px.DistributedDataParallel(mlp())

    def hook(state: px.DistributedDataParallel, bucket):
        return default_hooks.allreduce_hook(state.process_group, bucket)

    model.register_comm_hook(model, hook)
    for step in range(3):
        square_loss(model, dist.get_rank(), step).backward()
    references = freed(model)
    del model, hook
    assert_freed(references)


@ranks(2)
def test_after_an_exception_in_backward() -> None:
    model = px.DistributedDataParallel(mlp())
    square_loss(model, dist.get_rank(), 0).backward()
    output = model(batch(dist.get_rank()))
    output.register_hook(_raise)
    with pytest.raises(KeyError):
        output.sum().backward()
    references = freed(model)
    del model, output
    flush_engine()
    assert_freed(references)


@ranks(2)
def test_with_an_unfinished_step() -> None:
    model = px.DistributedDataParallel(Branches())
    model(batch(dist.get_rank()), (0,)).sum().backward()
    references = freed(model)
    del model
    assert_freed(references)


@ranks(2)
def test_the_module_outlives_its_wrapper() -> None:
    module = mlp()
    model = px.DistributedDataParallel(module)
    square_loss(model, dist.get_rank(), 0).backward()
    wrapper = weakref.ref(model)
    del model
    gc.collect()
    assert wrapper() is None
    if dist.get_rank() == 0:
        square_loss(module, 0, 1).backward()  # nobody else takes part


@ranks(2)
def test_many_wrappers_leave_no_sockets() -> None:
    """The harness fails this test if a descriptor, thread or socket is left behind."""
    for _ in range(5):
        group = dist.new_group()
        model = px.DistributedDataParallel(mlp(), process_group=group)
        square_loss(model, dist.get_rank(), 0).backward()
        del model
        dist.destroy_process_group(group)


@ranks(2)
def test_averages_kept_by_the_user_outlive_the_model() -> None:
    model = px.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    square_loss(model, dist.get_rank(), 0).backward()
    kept = model.module[0].weight.grad
    before = kept.clone()
    del model
    gc.collect()
    other = px.DistributedDataParallel(nn.Linear(6, 2))
    other(batch(dist.get_rank())).sum().backward()
    assert torch.equal(kept, before)


def _raise(_: object) -> None:
    raise KeyError("on purpose")


@ranks(2)
def test_an_instance_that_is_gone_takes_no_part() -> None:
    """The same module wrapped again: only the new instance's hooks are left, also after a join in which a rank ran out."""
    rank, module = dist.get_rank(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    for num_batches in (2, 3, 4):
        model = px.DistributedDataParallel(module, find_unused_parameters=True)
        with model.join():
            for _ in range(num_batches * rank):
                model(torch.ones(2, 3)).sum().backward()
        del model
        assert [len(p._post_accumulate_grad_hooks or ()) for p in module.parameters()] == [0, 0, 0, 0]
