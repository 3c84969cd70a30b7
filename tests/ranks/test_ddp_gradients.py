"""Where gradients live, in which buckets they travel, and which parameters are left alone."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Pair, image_loss, square_loss
from tests.ranks.replicas import batch, equal_on_all_ranks, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.testing import ranks


def buffers_of(model: px.DistributedDataParallel) -> set[int]:
    return {bucket.buffer.untyped_storage().data_ptr() for bucket in model._engine.buckets}


def storages(model: nn.Module) -> set[int]:
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters()}


@ranks(2)
def test_with_views_gradients_lie_in_the_buckets() -> None:
    model = px.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    for step in range(3):
        model.zero_grad()
        square_loss(model, dist.get_rank(), step).backward()
        assert storages(model) == buffers_of(model)


@ranks(2)
def test_without_views_gradients_are_their_own() -> None:
    model = px.DistributedDataParallel(mlp())
    for step in range(3):
        model.zero_grad()
        square_loss(model, dist.get_rank(), step).backward()
        assert not storages(model) & buffers_of(model)


@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_zeroed_in_place_gradients_stay_the_same_tensors(view: bool) -> None:
    """Code that holds on to `p.grad` (an optimizer's list, say) keeps seeing the averages."""
    model = px.DistributedDataParallel(mlp(), gradient_as_bucket_view=view)
    for step in range(2):  # the buckets are laid out anew behind the first
        square_loss(model, dist.get_rank(), step).backward()
    held = [p.grad for p in model.parameters()]
    for step in range(2, 5):
        model.zero_grad(set_to_none=False)
        assert all(not gradient.any() for gradient in held)
        square_loss(model, dist.get_rank(), step).backward()
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), held, strict=True))


@ranks(2)
def test_set_to_none_leaves_nothing_behind() -> None:
    model = px.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    square_loss(model, dist.get_rank(), 0).backward()
    model.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_channels_last_gradients_are_laid_out_as_the_weights(view: bool) -> None:
    def make() -> nn.Module:
        return BatchNormNet().to(memory_format=torch.channels_last)

    pair = Pair.of(make, gradient_as_bucket_view=view)
    pair.train(image_loss, steps=3)
    weight = pair.ours.module.features[3].weight
    assert weight.grad.stride() == weight.stride()


@ranks(2)
def test_zero_size_and_scalar_parameters() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            torch.manual_seed(0)
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale + self.empty.sum()

    Pair.of(Odd).train(square_loss, steps=3)


# -- buckets ----------------------------------------------------------------------------------------------------------


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])  # 64 KiB each


def num_buckets(model: TorchDDP | px.DistributedDataParallel, key: str) -> int:
    return len(model._get_ddp_logging_data()[key].split(","))


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"bucket_cap_mb": 64 / 1024}, 8),
        ({"bucket_cap_mb": 2 * 64 / 1024}, 4),
        ({"bucket_cap_mb": 25}, 1),
        ({"bucket_cap_mb_list": [64 / 1024, 7 * 64 / 1024]}, 2),
        ({"bucket_cap_mb_list": [64 / 1024]}, 8),
        ({}, 1),
    ],
    ids=["one each", "two each", "all", "list", "list of one", "default"],
)
@ranks(2)
def test_buckets_follow_the_caps(options: dict, wanted: int) -> None:
    pair = Pair.of(layers, **options)
    for step in range(3):
        for model in pair.both():
            model(batch(dist.get_rank(), step, width=128)).sum().backward()
    assert len(pair.ours._engine.buckets) == wanted
    assert num_buckets(pair.theirs, "rebuilt_bucket_sizes") == wanted
    assert num_buckets(pair.ours, "rebuilt_bucket_sizes") == wanted
    assert pair.ours.bucket_bytes_cap == pair.theirs.bucket_bytes_cap
    assert pair.ours.bucket_bytes_cap_list == pair.theirs.bucket_bytes_cap_list


@ranks(2)
def test_until_the_order_is_known_there_is_one_bucket() -> None:
    pair = Pair.of(layers, bucket_cap_mb=64 / 1024)
    assert [num_buckets(model, "bucket_sizes") for model in pair.both()] == [1, 1]


@ranks(2)
def test_buckets_are_not_rebuilt_where_unused_parameters_are_looked_for() -> None:
    model = px.DistributedDataParallel(layers(), bucket_cap_mb=64 / 1024, find_unused_parameters=True)
    assert len(model._engine.buckets) == 8
    for step in range(2):
        model(batch(dist.get_rank(), step, width=128)).sum().backward()
    assert not model._has_rebuilt_buckets


# -- parameters that are left alone -----------------------------------------------------------------------------------


class WithOwn(nn.Module):
    """A parameter and a buffer of the root's own, whose names have no dot, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.shift = nn.Parameter(torch.randn(6))
        self.register_buffer("seen", torch.full((1,), float(dist.get_rank())))
        self.layer = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.shift)


def ignoring(*names: str, **options: object) -> px.DistributedDataParallel:
    model = WithOwn()
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, list(names))
    return px.DistributedDataParallel(model, **options)


@pytest.mark.parametrize("name", ["shift", "layer.weight"])
@ranks(2)
def test_ignored_parameters_stay_each_ranks_own(name: str) -> None:
    model = ignoring(name)
    square_loss(model, dist.get_rank(), 0).backward()
    for other, parameter in model.module.named_parameters():
        assert equal_on_all_ranks(parameter) == (other != name)
        assert equal_on_all_ranks(parameter.grad) == (other != name)


@ranks(2)
def test_ignored_buffers_are_not_broadcast() -> None:
    model = ignoring("seen")
    model(batch(0))
    assert model.module.seen.item() == dist.get_rank()
    assert ignoring("shift").module.seen.item() == 0


@ranks(2)
def test_a_backward_past_the_wrapper_stays_local() -> None:
    """torch's contract: what synchronises is announced by the wrapper's forward."""
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    if rank == 0:
        for model in pair.both():
            model.module(batch(0)).square().sum().backward()
    for model in pair.both():
        square_loss(model, rank, 1).backward()
    pair.compare_gradients()


# -- construction ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_parameters_and_buffers_are_rank_0s() -> None:
    model = px.DistributedDataParallel(WithOwn())
    assert all(equal_on_all_ranks(tensor) for tensor in model.module.state_dict().values())


@ranks(2)
def test_init_sync_false_makes_no_collective() -> None:
    """One rank alone wraps, and goes on; nothing is copied."""
    if dist.get_rank() == 1:
        before = WithOwn().shift.clone()
        model = px.DistributedDataParallel(WithOwn(), init_sync=False)
        assert torch.equal(model.module.shift, before) and model.module.seen.item() == 1
    dist.barrier()


@ranks(2)
def test_after_init_sync_false_gradients_are_averaged_as_ever() -> None:
    Pair.of(mlp, init_sync=False).train(square_loss, steps=3)


@ranks(2)
def test_frozen_parameters_are_broadcast_but_not_reduced() -> None:
    model = WithOwn()
    model.shift.requires_grad_(False)
    wrapped = px.DistributedDataParallel(model)
    assert equal_on_all_ranks(wrapped.module.shift)
    square_loss(wrapped, dist.get_rank(), 0).backward()
    assert wrapped.module.shift.grad is None and equal_on_all_ranks(wrapped.module.layer.weight.grad)


@ranks(2)
def test_arguments_that_change_nothing_are_accepted() -> None:
    with pytest.warns(FutureWarning, match="check_reduction"):
        px.DistributedDataParallel(mlp(), check_reduction=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = px.DistributedDataParallel(mlp(), dim=1, batched_grad_copy=True, device_ids=[])
    assert (model.dim, model.batched_grad_copy, model.device_ids, model.output_device) == (1, True, None, None)
