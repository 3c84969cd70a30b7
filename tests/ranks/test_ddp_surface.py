"""What other code reaches into: attributes, the reducer, pickling, meshes, outputs of any nesting."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Pair, image_loss, square_loss
from tests.ranks.replicas import batch, equal_on_all_ranks, gradients, mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.testing import ranks


@ranks(2)
def test_it_is_a_torch_ddp_with_torchs_state_dict() -> None:
    pair = Pair.of(BatchNormNet)
    assert isinstance(pair.ours, TorchDDP)
    assert list(pair.ours.state_dict()) == list(pair.theirs.state_dict())
    assert next(iter(pair.ours.state_dict())) == "module.features.0.weight"
    assert pair.ours.module.head.weight is dict(pair.ours.named_parameters())["module.head.weight"]
    pair.theirs.load_state_dict(pair.ours.state_dict())
    pair.ours.load_state_dict(pair.theirs.state_dict())


@ranks(2)
def test_it_has_the_attributes_that_torchs_has() -> None:
    """Every instance attribute of torch's that is not a part of its C++ reducer's or its compiler's machinery."""
    pair = Pair.of(mlp)
    for model in pair.both():
        square_loss(model, dist.get_rank(), 0).backward()
    without = {
        "_bucket_config",  # ours is BucketCaps, in _caps
    }
    assert set(vars(pair.theirs)) - set(vars(pair.ours)) == without


@ranks(2)
def test_the_reducer_by_hand() -> None:
    """torch's pipelining runs the module itself and announces its backward with `prepare_for_backward`."""
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for model in pair.both():
        model.reducer.prepare_for_backward([])
        model.module(batch(rank)).square().sum().backward()
        model._check_reducer_finalized()
    pair.compare_gradients()
    assert equal_on_all_ranks(pair.ours.module[0].weight.grad)


@ranks(2)
def test_removed_hooks_leave_gradients_local() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp())
    model._remove_autograd_hooks()
    model(batch(rank)).square().sum().backward()
    alone = mlp()
    alone(batch(rank)).square().sum().backward()
    for name, gradient in gradients(model.module).items():
        assert torch.equal(gradient, gradients(alone)[name])


# -- pickling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@ranks(2)
def test_a_pickled_copy_trains_on(options: dict) -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(BatchNormNet(), **options)
    for step in range(2):
        model.zero_grad()
        image_loss(model, rank, step).backward()
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(twin) is px.DistributedDataParallel
        reference = copy.deepcopy(model)
        for m in (twin, reference):
            m.zero_grad()
            image_loss(m, rank, 5).backward()
        for mine, other in zip(twin.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad) and equal_on_all_ranks(mine.grad)


@ranks(2)
def test_saved_and_loaded_through_a_file() -> None:
    model = px.DistributedDataParallel(mlp())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    square_loss(loaded, dist.get_rank(), 0).backward()
    assert equal_on_all_ranks(loaded.module[0].weight.grad)


def noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@ranks(2)
def test_a_pickled_copy_takes_a_hook_anew() -> None:
    """As with torch: hooks do not travel, and the copy averages until one is registered."""
    model = px.DistributedDataParallel(mlp())
    model.register_comm_hook(None, noop)
    twin = pickle.loads(pickle.dumps(model))
    square_loss(twin, dist.get_rank(), 0).backward()
    assert equal_on_all_ranks(twin.module[0].weight.grad)
    twin.register_comm_hook(None, noop)
    twin.zero_grad()
    square_loss(twin, dist.get_rank(), 0).backward()
    assert not equal_on_all_ranks(twin.module[0].weight.grad)


@ranks(2)
def test_pickling_with_another_group_is_refused_in_torchs_words() -> None:
    model = px.DistributedDataParallel(mlp(), process_group=dist.new_group())
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default process group"):
        pickle.dumps(model)


# -- meshes -----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_mesh_of_one_dimension() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = px.DistributedDataParallel(mlp(), device_mesh=mesh)
    assert model.process_group is mesh.get_group() and model.device_mesh is mesh
    square_loss(model, dist.get_rank(), 0).backward()
    assert equal_on_all_ranks(model.module[0].weight.grad)


@ranks(4)
def test_one_dimension_of_a_larger_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = px.DistributedDataParallel(mlp(), device_mesh=mesh["dp"])
    square_loss(model, dist.get_rank(), 0).backward()
    parts = [torch.empty_like(model.module[0].weight) for _ in range(4)]
    dist.all_gather(parts, model.module[0].weight.grad)
    assert torch.equal(parts[0], parts[2]) and torch.equal(parts[1], parts[3]) and not torch.equal(parts[0], parts[1])


# -- outputs ----------------------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@dataclass
class Outputs:
    loss: torch.Tensor
    extra: list


class Own:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Returns(nn.Module):
    """Returns what the function named makes of its layer's output."""

    def __init__(self, make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 2)
        self.make = make

    def forward(self, x: torch.Tensor):
        return self.make(self.layer(x))


OUTPUTS = {
    "tuple": (lambda t: (t, 1, None), lambda o: o[0]),
    "list": (lambda t: [[t]], lambda o: o[0][0]),
    "dict": (lambda t: {"a": {"b": t}, "c": "text"}, lambda o: o["a"]["b"]),
    "ordered": (lambda t: OrderedDict(a=t), lambda o: o["a"]),
    "named": (lambda t: Point(x=t, y=[t + 1]), lambda o: o.x + o.y[0]),
    "dataclass": (lambda t: Outputs(t, [t * 2]), lambda o: o.loss + o.extra[0]),
    "custom": (Own, lambda o: o.tensor),
    "mixed": (lambda t: (Outputs(t, [{"k": Own(t)}]), torch.ones(2)), lambda o: o[0].extra[0]["k"].tensor + o[1]),
}


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.parametrize("which", OUTPUTS)
@ranks(2)
def test_outputs_of_any_nesting(which: str, options: dict) -> None:
    make, read = OUTPUTS[which]
    model = px.DistributedDataParallel(Returns(make), **options)
    for step in range(3):
        model.zero_grad()
        output = model(batch(dist.get_rank(), step))
        assert type(output) is type(make(torch.zeros(2)))
        read(output).square().sum().backward()
        assert equal_on_all_ranks(model.module.layer.weight.grad)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@ranks(2)
def test_an_output_may_be_changed_in_place(options: dict) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        output = model(batch(rank, step))
        output += 1
        output[0] *= 2
        return output.square().mean()

    Pair.of(mlp, **options).train(loss, steps=3)


@ranks(2)
def test_keyword_arguments_and_no_arguments() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, *, scale: float = 1.0) -> torch.Tensor:
            return (self.weight * scale).sum()

    model = px.DistributedDataParallel(Keywords())
    model().backward()
    model.zero_grad()
    model(scale=float(dist.get_rank())).backward()
    assert torch.equal(model.module.weight.grad, torch.full((2,), 0.5))
