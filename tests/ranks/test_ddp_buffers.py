"""Buffers: rank 0's, before each forward or not at all, and never in a way that backward could notice."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Pair, image_loss, images
from tests.ranks.replicas import batch, equal_on_all_ranks
from torch import nn

import phalanx as px
from phalanx.testing import ranks


class Counts(nn.Module):
    """A buffer that differs by rank and counts calls, and one that is no floating-point number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.register_buffer("calls", torch.full((1,), 100.0 * dist.get_rank()))
        self.register_buffer("flags", torch.full((3,), dist.get_rank(), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"broadcast_buffers": False},
        {"forward_sync_buffers": False},
        {"forward_sync_buffers": True},
        {"init_sync": False},
    ],
    ids=["default", "broadcast off", "forward off", "forward on", "no init"],
)
@ranks(2)
def test_buffers_are_what_torchs_are(options: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        pair = Pair.of(Counts, **options)
    pair.compare_state("at construction")
    for step in range(3):
        for model in pair.both():
            model.zero_grad()
            model(batch(dist.get_rank(), step)).sum().backward()
        pair.compare_state(f"after step {step}")
        pair.compare_gradients(f"after step {step}")
    assert pair.ours.broadcast_buffers == pair.theirs.broadcast_buffers


@ranks(2)
def test_the_deprecated_argument_warns() -> None:
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        px.DistributedDataParallel(Counts(), broadcast_buffers=True)
    with pytest.warns(FutureWarning, match="is ignored"):
        model = px.DistributedDataParallel(Counts(), broadcast_buffers=True, forward_sync_buffers=False)
    assert model.forward_sync_buffers is False
    model.broadcast_buffers = True
    assert model.forward_sync_buffers is True


@ranks(2)
def test_two_forwards_before_one_backward() -> None:
    """The broadcast is not a change that autograd could object to, as with torch."""
    pair = Pair.of(BatchNormNet)

    def twice(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return image_loss(model, rank, step) + image_loss(model, rank, 50 + step)

    pair.train(twice, steps=3)


@ranks(2)
def test_replaced_buffers_are_found() -> None:
    model = px.DistributedDataParallel(Counts())
    model.module.calls = torch.full((1,), 7.0 + dist.get_rank())
    model(batch(0))
    assert model.module.calls.item() == 8.0


@ranks(2)
def test_whatever_becomes_of_buffers_rank_0s_are_everywhere() -> None:
    """Added, taken away, cast, resized, pointed elsewhere, and in a part of the module that is another now."""
    rank = dist.get_rank()
    module = nn.Sequential(Counts(), nn.BatchNorm1d(2))
    model = px.DistributedDataParallel(module)

    def check(what: str) -> None:
        model(batch(0))
        for name, buffer in module.named_buffers():
            assert equal_on_all_ranks(buffer.double()), f"{name}, {what}"

    def differ() -> None:
        for buffer in module.buffers():
            buffer.add_(rank)

    def become(**values: torch.Tensor | None) -> None:
        for name, value in values.items():
            module[0]._buffers[name] = value

    changes = {
        "as it was": lambda: None,
        "one more": lambda: module[0].register_buffer("more", torch.full((5,), 1.0 * rank)),
        "one that was nothing": lambda: become(more=None, late=torch.full((2,), 1.0 * rank)),
        "another in the place of one that is nothing": lambda: (
            module[0]._buffers.pop("more"),
            become(new=torch.ones(2)),
        ),
        "one fewer": lambda: module[0]._buffers.pop("late"),
        "cast": lambda: setattr(module[0].flags, "data", module[0].flags.data.int()),
        "resized": lambda: setattr(module[0].calls, "data", torch.full((2,), 1.0 * rank)),
        "a part begun anew": lambda: module[1].__init__(2),  # type: ignore[misc]
        "another part": lambda: module.__setitem__(1, nn.BatchNorm1d(2)),
        "another part, past registration": lambda: module._modules.update({"1": nn.BatchNorm1d(2)}),
    }
    for what, change in changes.items():
        change()
        differ()
        check(what)
        check(f"{what}, again")


@ranks(2)
def test_another_module_and_what_is_ignored_later() -> None:
    model = px.DistributedDataParallel(Counts())
    model(batch(0)).sum().backward()
    model.module = Counts()
    model(batch(0))
    assert model.module.calls.item() == 1.0 and not model.module.flags.any()
    model.parameters_to_ignore.add("flags")
    model.module.flags.fill_(dist.get_rank())
    model(batch(0))
    assert model.module.flags.tolist() == [dist.get_rank()] * 3


@ranks(2)
def test_buffers_that_changed_before_an_evaluation_in_inference_mode() -> None:
    """What is kept for sending is made there, and used in training."""
    model = px.DistributedDataParallel(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    rank = dist.get_rank()
    for step in range(3):
        model(batch(rank, step)).sum().backward()
        fresh = {name: value + rank for name, value in model.module.state_dict().items() if "running" in name}
        model.module.load_state_dict(fresh, assign=True, strict=False)
        model.eval()
        with torch.inference_mode():
            model(batch(rank, step))
        model.train()
        assert equal_on_all_ranks(model.module[1].running_mean)


@ranks(2)
def test_scripted_and_traced_modules() -> None:
    for make in (torch.jit.script, lambda net: torch.jit.trace(net, torch.randn(4, 6))):
        torch.manual_seed(dist.get_rank())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model = px.DistributedDataParallel(make(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))))
        for step in range(3):
            model(batch(dist.get_rank(), step)).sum().backward()
        with torch.no_grad():
            model(batch(0, 9))
        for buffer in model.module.buffers():
            assert equal_on_all_ranks(buffer.double())


@ranks(2)
def test_conjugate_and_negative_views_as_buffers() -> None:
    for negative in (False, True):
        for wrap in (px.DistributedDataParallel, px.replicate):
            net, whole = nn.Linear(6, 2), torch.full((3,), complex(dist.get_rank(), -1.0))
            net.register_buffer("lazy", whole.conj().imag if negative else whole.conj())
            model = wrap(net)
            for step in range(2):
                model(batch(dist.get_rank(), step)).sum().backward()
            assert net.lazy.tolist() == [1.0 if negative else 1j] * 3


@ranks(2)
def test_buffers_that_are_not_there_yet() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = px.DistributedDataParallel(net, init_sync=False, broadcast_buffers=False)
        for step in range(2):
            model(batch(dist.get_rank(), step)).sum().backward()


class Finds(nn.Module):
    """Says itself what its buffers are; one is in no table."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.elsewhere = SimpleNamespace(stat=torch.zeros(2))

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        yield f"{prefix}.stat" if prefix else "stat", self.elsewhere.stat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.elsewhere.stat.sum() * 0


@ranks(2)
def test_buffers_that_a_module_finds_by_itself() -> None:
    net = Finds()
    model = px.DistributedDataParallel(net)
    for step in range(4):
        net.elsewhere.stat = torch.full((2,), 10.0 * step + dist.get_rank())
        model(batch(dist.get_rank(), step)).sum().backward()
        assert net.elsewhere.stat.tolist() == [10.0 * step] * 2


@ranks(2)
def test_ignored_buffers_are_not_looked_at() -> None:
    for odd in (
        nn.parameter.UninitializedBuffer(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        net = Counts()
        net.register_buffer("odd", odd)
        px.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["odd"])
        model = px.DistributedDataParallel(net)
        for step in range(2):
            model(batch(dist.get_rank(), step)).sum().backward()


@ranks(2)
def test_a_hook_may_do_with_the_dict_what_it_likes() -> None:
    model = px.DistributedDataParallel(Counts())
    seen = []

    def hook(_: object, named: dict[str, torch.Tensor]) -> None:
        seen.append(sorted(named))
        named.clear()

    model._register_buffer_comm_hook(None, hook)
    for step in range(3):
        model(batch(0, step)).sum().backward()
    assert seen == [["calls", "flags"]] * 3


@ranks(2)
def test_in_eval_mode_buffers_are_broadcast_as_with_torch() -> None:
    """torch looks at the last synchronised forward, not at the mode: ranks run eval through the wrapper together."""
    pair = Pair.of(BatchNormNet)
    pair.train(image_loss, steps=2)
    outputs = []
    for model in pair.both():
        model.eval()
        with torch.no_grad():
            outputs.append(model(images(dist.get_rank(), 7)))
    assert torch.equal(*outputs)
    pair.compare_state("after eval")
    assert equal_on_all_ranks(pair.ours.module.features[1].running_mean)
