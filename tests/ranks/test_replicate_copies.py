"""The module stays what it was; copies are plain modules; whoever holds the parameters keeps the synchronisation."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, batch, check_steps, equal_on_all_ranks, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.testing import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.note = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@ranks(2)
def test_the_same_class_attributes_and_keys() -> None:
    model, plain = Net(), Net()
    attributes, keys = set(vars(model)), list(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert px.replicate(model) is model
    plain_loss(model, dist.get_rank(), 0).backward()
    assert type(model) is Net
    assert set(vars(model)) == attributes == set(vars(plain))
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert repr(model) == repr(plain)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@ranks(2)
def test_copies_are_plain_and_train_alone() -> None:
    rank = dist.get_rank()
    model = px.replicate(Net(), **SMALL)
    plain_loss(model, rank, 0).backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
    for twin in twins:
        assert type(twin) is Net
        assert not px.is_replicated(twin)
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
        if rank == 0:  # nobody else takes part, and nobody needs to
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
            twin.zero_grad()
            plain_loss(twin, rank, 1).backward()
            optimizer.step()
    check_steps(model, Net(), plain_loss)


@ranks(2)
def test_a_copy_can_be_replicated_itself() -> None:
    model = px.replicate(Net(), **SMALL)
    plain_loss(model, dist.get_rank(), 0).backward()
    twin = px.replicate(copy.deepcopy(model), **SMALL)
    check_steps(twin, Net(), plain_loss)
    check_steps(model, Net(), plain_loss)


@ranks(2)
def test_rank_0s_values_are_copied_to_all() -> None:
    model = px.replicate(mlp(seed=dist.get_rank()))
    assert all(equal_on_all_ranks(p) for p in model.parameters())
    assert torch.equal(model[0].weight, mlp(seed=0)[0].weight)


@ranks(2)
def test_a_container_that_nobody_keeps() -> None:
    rank = dist.get_rank()
    first, second = mlp(), mlp(1)
    px.replicate(nn.ModuleList([first, second]), **SMALL)
    gc.collect()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)
    for step in range(4):
        optimizer.zero_grad()
        (first(batch(rank, step)) * second(batch(rank, step))).square().sum().backward()
        optimizer.step()
        twins = mlp(), mlp(1)
        losses = [(twins[0](batch(r, step)) * twins[1](batch(r, step))).square().sum() for r in range(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        for module, twin in zip((first, second), twins, strict=True):
            for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


@ranks(2)
def test_what_a_lost_container_held_is_known_to_be_replicated() -> None:
    import pytest

    first, second = mlp(), mlp(1)
    px.replicate(nn.ModuleList([first, second]))
    gc.collect()
    with pytest.raises(ValueError, match="already replicated"):
        px.replicate(first)


@ranks(2)
def test_when_part_of_a_lost_container_is_gone_unrelated_optimizers_still_step() -> None:
    first, second = mlp(), mlp(1)
    px.replicate(nn.ModuleList([first, second]))
    del first
    gc.collect()
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    px.replicate(other)


@ranks(2)
def test_a_replicated_model_is_freed_with_all_that_belongs_to_it() -> None:
    rank = dist.get_rank()
    model = px.replicate(Net(), **SMALL)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        plain_loss(model, rank, step).backward()
        optimizer.step()
    bucket = weakref.ref(model.layers[0].weight.grad.untyped_storage())
    watched = [weakref.ref(model), weakref.ref(model.layers[0].weight), weakref.ref(optimizer)]
    gc.disable()  # the model itself goes at once; only Phalanx's own records may need the collector
    try:
        del model, optimizer
        assert [ref() for ref in watched[:2]] == [None, None]
    finally:
        gc.enable()
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]
    assert bucket() is None


@ranks(2)
def test_gradients_outlive_the_model() -> None:
    model = px.replicate(nn.Linear(2, 1, bias=False))
    model(torch.ones(2)).sum().backward()
    gradient = model.weight.grad
    del model
    gc.collect()
    assert torch.equal(gradient, torch.ones(1, 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_replicating_again_and_again_keeps_no_sockets(backend: str) -> None:
    _again_and_again(backend)


@ranks(2, backend=None, timeout_s=50)
def _again_and_again(backend: str) -> None:
    dist.init_process_group(backend)
    counts = []
    for _ in range(6):
        model = px.replicate(mlp())
        model(batch(dist.get_rank())).sum().backward()
        dist.barrier()
        del model
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert max(counts[1:]) <= counts[0], counts
