"""`px.swap_ddp` in ranks: who asks for torch's class gets ours, and everything that is asked about it holds."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.parallel
from tests.ranks.replicas import batch, equal_on_all_ranks, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TakenBefore

import phalanx as px
from phalanx.testing import ranks


class Counting(TakenBefore):
    """As frameworks derive from torch's class: state of its own, and `super()`."""

    def __init__(self, module: nn.Module, **options: object) -> None:
        super().__init__(module, **options)
        self.num_forwards = 0

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return super().forward(*inputs)


class Spelled(TakenBefore):
    """The base class by its name, not by `super()`."""

    def __init__(self, module: nn.Module) -> None:
        TakenBefore.__init__(self, module)


def train(model: nn.Module, *, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(dist.get_rank() + 10 * step)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("kind", [TakenBefore, Counting, Spelled])
@ranks(2)
def test_it_trains_as_torchs_does_whoever_constructs_it(kind: type) -> None:
    theirs = kind(mlp())
    train(theirs)
    expected = weights(theirs)
    assert not isinstance(theirs, px.DistributedDataParallel)
    del theirs
    with px.swap_ddp():
        ours = kind(mlp())
        assert isinstance(ours, px.DistributedDataParallel), "the constructor of a name taken before was not replaced"
        train(ours)
    torch.testing.assert_close(weights(ours), expected, rtol=1e-6, atol=1e-6)
    assert equal_on_all_ranks(weights(ours))
    assert getattr(ours, "num_forwards", 3) == 3


@ranks(3, backend="phalanx")
def test_on_our_group() -> None:
    theirs = TakenBefore(mlp())
    train(theirs)
    expected = weights(theirs)
    del theirs
    with px.swap_ddp():
        ours = torch.nn.parallel.DistributedDataParallel(mlp())
        train(ours)
    torch.testing.assert_close(weights(ours), expected, rtol=1e-6, atol=1e-6)


@ranks(2)
def test_isinstance_holds_with_every_name_during_and_after() -> None:
    with px.swap_ddp():
        taken_during = torch.nn.parallel.DistributedDataParallel
        models = [TakenBefore(mlp()), taken_during(mlp()), Counting(mlp())]
        for model in models:
            assert isinstance(model, TakenBefore)
            assert isinstance(model, taken_during)
            assert isinstance(model, torch.nn.parallel.distributed.DistributedDataParallel)
        assert type(models[0]) is torch.nn.parallel.DistributedDataParallel
        assert isinstance(models[2], Counting)
    for model in models:
        assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
        assert isinstance(model, taken_during)
        train(model, steps=1)  # what was wrapped stays ours, and works on
    fresh = torch.nn.parallel.DistributedDataParallel(mlp())
    assert not isinstance(fresh, px.DistributedDataParallel)


@ranks(2)
def test_a_class_derived_while_it_lasts_derives_from_ours() -> None:
    with px.swap_ddp():

        class Later(torch.nn.parallel.DistributedDataParallel):
            pass

        assert issubclass(Later, px.DistributedDataParallel)
        train(Later(mlp()), steps=1)


@pytest.mark.parametrize("kind", [TakenBefore, Counting])
@ranks(2)
def test_it_pickles_and_copies_during_and_after(kind: type) -> None:
    with px.swap_ddp():
        model = kind(mlp())
        during = pickle.dumps(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [pickle.loads(during), torch.load(file, weights_only=False), copy.deepcopy(model)]
    copies += [pickle.loads(during), pickle.loads(pickle.dumps(model))]
    train(model)
    for twin in copies:
        assert type(twin) is type(model) and isinstance(twin, kind)
        train(twin)
        torch.testing.assert_close(weights(twin), weights(model), rtol=0, atol=0)


@ranks(2)
def test_what_torchs_class_pickled_is_loaded_as_ours() -> None:
    model = TakenBefore(mlp(), bucket_cap_mb=1, find_unused_parameters=True)
    pickled = pickle.dumps(model)
    train(model)
    expected = weights(model)
    del model
    with px.swap_ddp():
        loaded = pickle.loads(pickled)
    assert type(loaded) is px.DistributedDataParallel
    assert loaded.find_unused_parameters and loaded.bucket_bytes_cap == 1024 * 1024
    train(loaded)
    torch.testing.assert_close(weights(loaded), expected, rtol=1e-6, atol=1e-6)


@ranks(2)
def test_too_late_is_an_error_that_says_what_to_do() -> None:
    model = TakenBefore(nn.Sequential(mlp()))
    with pytest.raises(
        ValueError, match=r"1 model\(s\) are wrapped .*a Sequential.* before the first model is wrapped"
    ):
        px.swap_ddp()
    assert torch.nn.parallel.DistributedDataParallel is TakenBefore
    assert not isinstance(TakenBefore(mlp()), px.DistributedDataParallel)
    del model
    with px.swap_ddp():  # gone, so it is not too late
        again = TakenBefore(mlp())
        assert isinstance(again, px.DistributedDataParallel)
        with px.swap_ddp():  # and ours are no obstacle
            pass


@ranks(2)
def test_accumulation_under_the_swap() -> None:
    def accumulate(model: nn.Module) -> torch.Tensor:
        rank = dist.get_rank()
        with model.no_sync():
            model(batch(rank)).sum().backward()
        model(batch(rank + 7)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = accumulate(TakenBefore(mlp()))
    with px.swap_ddp():
        got = accumulate(TakenBefore(mlp()))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@ranks(2)
def test_layers_and_samplers_when_asked_for() -> None:
    rank = dist.get_rank()
    with px.swap_ddp(sync_batchnorm=True, sampler=True):
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = torch.nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(layers))
        assert isinstance(model.module[1], px.SyncBatchNorm)
        model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        assert equal_on_all_ranks(model.module[1].running_mean)
        sampler = torch.utils.data.DistributedSampler(list(range(10)), shuffle=False)
        assert isinstance(sampler, px.DistributedSampler) and list(sampler) == list(range(rank, 10, 2))
    assert not issubclass(nn.SyncBatchNorm, px.SyncBatchNorm)
