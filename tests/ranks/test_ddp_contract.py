"""torch's DDP, member by member: what each attribute holds and what each method does, on our class and on torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Branches, Pair, image_loss, square_loss
from tests.ranks.replicas import batch, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.api.ddp.torch_reducer import TorchReducer
from phalanx.testing import ranks, run_ranks

EVERYWHERE = [(2, "gloo"), (3, "gloo"), (2, "phalanx"), (3, "phalanx")]
PLAIN = (bool, int, float, str, type(None), set, torch.device)
OTHER_VALUES = {
    "use_side_stream_for_tensor_copies": "copies are non-blocking on the current stream",
    "_static_graph_delay_allreduce_enqueued": "set by torch's sink in backward, which ours does without",
}
OTHER_REDUCER = {
    "_autograd_hook": "torch's mixed precision calls it; ours puts casts into the graph",
    "_set_mixed_precision_param_dtype": "as above",
    "_set_optimizer_in_backward": "ours takes optimizers over by itself",
    "_set_static_graph": "options of the engine: DistributedDataParallel._set_static_graph",
    "_set_ddp_runtime_logging_sample_rate": "the logger's",
    "get_backward_stats": "times of single gradients: phalanx.events has them",
    "set_logger": "the logger reads the engine",
    "_pybind11_conduit_v1_": "pybind's",
}


class Groups:
    """Two groups for any number of pairs: making one costs more than what is tested on it."""

    def __init__(self) -> None:
        self.ours, self.theirs = dist.new_group(), dist.new_group()

    def pair(self, make: Callable[[], nn.Module], **options: Any) -> Pair:
        ours = px.DistributedDataParallel(make(), process_group=self.ours, **options)
        return Pair(ours, TorchDDP(make(), process_group=self.theirs, **options))


def steps(pair: Pair, loss: Any, num_steps: int = 2) -> None:
    for step in range(num_steps):
        for model in pair.both():
            model.zero_grad()
            loss(model, dist.get_rank(), step).backward()
        pair.compare_gradients(f"after step {step}", rtol=1e-5, atol=1e-6)


def test_the_reducer_has_torchs_methods() -> None:
    missing = {name for name in dir(dist.Reducer) if not hasattr(TorchReducer, name)}
    assert missing == set(OTHER_REDUCER)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
    {"bucket_cap_mb_list": [1, 2]},
    {"forward_sync_buffers": False},
    {"init_sync": False},
]


def check_attributes() -> None:
    groups = Groups()
    for options in OPTIONS:
        pair = groups.pair(BatchNormNet, **options)
        for when in ("new", "trained"):
            if when == "trained":
                steps(
                    pair, image_loss, num_steps=3
                )  # ours lays buckets out anew when backward begins, torch before forward
            mine, other = map(vars, pair.both())
            differ = {k for k, v in other.items() if k in mine and isinstance(v, PLAIN) and mine[k] != v}
            assert differ <= set(OTHER_VALUES), f"{options}, {when}: {differ}"


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
def test_attributes_have_torchs_values(world_size: int, backend: str) -> None:
    run_ranks(check_attributes, world_size, backend=backend)


def check_methods() -> None:
    groups = Groups()
    check_buffer_questions(groups)
    check_finalized(groups)
    check_sink(groups)
    check_static(groups)
    check_skipping(groups)
    check_sparse_metadata(groups)


def check_buffer_questions(groups: Groups) -> None:
    questions = ("will_sync_module_buffers", "_check_sync_bufs_pre_fwd", "_check_sync_bufs_post_fwd")
    for options in ({}, {"forward_sync_buffers": False}):
        pair = groups.pair(BatchNormNet, **options)
        answers = []
        for model in pair.both():
            said = []
            for require in (True, False):
                model.require_forward_param_sync = require
                said += [getattr(model, question)() for question in questions]
            model.broadcast_buffers = not model.broadcast_buffers
            said += [model.forward_sync_buffers, model.will_sync_module_buffers()]
            answers.append(said)
        assert answers[0] == answers[1]
    pair = groups.pair(mlp)
    assert [bool(model.will_sync_module_buffers()) for model in pair.both()] == [False, False]


def check_finalized(groups: Groups) -> None:
    for model in groups.pair(Branches).both():
        model._check_reducer_finalized()  # before the first step
        model(batch(dist.get_rank())).sum().backward()
        model._check_reducer_finalized()
        model(batch(dist.get_rank()), (0,)).sum().backward()  # leaves a branch out
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            model._check_reducer_finalized()


def check_sink(groups: Groups) -> None:
    """By default outputs are copies where unused parameters are looked for."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.layer(x)
            return self.kept

    for options, clone, copies in (
        ({"find_unused_parameters": True}, True, True),
        ({"find_unused_parameters": True}, False, False),
        ({}, True, False),
    ):
        for model in groups.pair(Keeps, **options).both():
            model._set_ddp_sink_clone(clone)
            output = model(batch(dist.get_rank()))
            assert (output.data_ptr() != model.module.kept.data_ptr()) == copies
            output.sum().backward()


def check_static(groups: Groups) -> None:
    for model in groups.pair(mlp).both():
        model._set_static_graph()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model._set_static_graph()
        assert any("no need to set it again" in str(warning.message) for warning in caught)
        square_loss(model, dist.get_rank(), 0).backward()
    for model in groups.pair(mlp).both():
        square_loss(model, dist.get_rank(), 0).backward()
        with pytest.raises(RuntimeError, match="before training loop starts"):
            model._set_static_graph()


def check_skipping(groups: Groups) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step), (1,)).square().mean()

    flags = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.00005}
    for options in (flags, {**flags, "gradient_as_bucket_view": True}):
        pair = groups.pair(Branches, **options)
        steps(pair, loss, num_steps=4)
        reduced = [model._get_ddp_logging_data()["num_buckets_reduced"] for model in pair.both()]
        assert reduced[0] == reduced[1] == 4


def check_sparse_metadata(groups: Groups) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))

    pair = groups.pair(net)
    for step in range(2):
        rows = torch.arange(4) + dist.get_rank() + step
        on_any_rank = torch.arange(4 + dist.get_world_size() - 1) + step
        for model in pair.both():
            model.zero_grad()
            if model is pair.ours:  # on Gloo torch's own then fails: "Sparse metadata and gradient size mismatch"
                model._set_sparse_metadata({"0.weight": on_any_rank})
            model(rows).square().sum().backward()
        mine, other = (model.module[0].weight.grad for model in pair.both())
        assert mine.is_sparse
        torch.testing.assert_close(mine.to_dense(), other.to_dense())
    with pytest.raises(ValueError, match=r"no parameter 'weight'; those with sparse gradients: 0\.weight"):
        pair.ours._set_sparse_metadata({"weight": torch.arange(2)})
    with pytest.raises(TypeError, match="row numbers"):
        pair.ours._set_sparse_metadata({"0.weight": [1, 2]})


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
def test_methods_do_what_torchs_do(world_size: int, backend: str) -> None:
    run_ranks(check_methods, world_size, backend=backend)


@ranks(2)
def test_methods_for_old_callers() -> None:
    x = batch(0)
    for model in Pair.of(mlp).both():
        inputs, keywords = model.to_kwargs((x,), {"y": x}, 0)
        assert torch.equal(inputs[0][0], x) and torch.equal(keywords[0]["y"], x)
        assert model.eval() is model and not model.module.training
        assert list(model._get_parameters(model.module)) == list(model.module.parameters())
        assert list(TorchDDP._get_data_parallel_params(model.module)) == list(model.module.parameters())
