"""Tensor parallelism over one axis of a mesh, data parallelism over the other: the same numbers as one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tests.ranks.tensor_parallel_model import KEEPS, alone, grid, loss_of, optimizer_of, parallel_transformer, tokens_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import phalanx as px
from phalanx.testing import run_ranks

NUM_STEPS, NUM_MORE = 20, 3
State = dict[str, torch.Tensor]


def whole(model: nn.Module) -> State:
    return {
        name: p.full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in model.named_parameters()
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> list[float]:
    """Each row of the mesh takes its share of the batch; returns the losses of the whole batch."""
    losses = []
    dp = mesh["dp"]
    for step in steps:
        loss = loss_of(model, tokens_of(step).chunk(dp.size())[dp.get_local_rank()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=dp.get_group())
        losses.append(total.item() / dp.size())
    return losses


@contextmanager
def no_conversions() -> Iterator[None]:
    """Fails where a DTensor is made from a plain parameter, or a module's tables are written: per forward, that is."""
    made: list[str] = []
    original = DTensor.from_local

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> DTensor:
        if isinstance(tensor, nn.Parameter):
            made.append(str(tuple(tensor.shape)))
        return original(tensor, *args, **kwargs)

    DTensor.from_local = staticmethod(counted)
    try:
        yield
    finally:
        DTensor.from_local = staticmethod(original)
    assert not made


def train_and_save(path: str, face: str) -> tuple[list[float], State]:
    mesh = grid(2, 2)
    model: nn.Module = parallel_transformer(mesh)
    if face == "replicate":
        px.replicate(model, device_mesh=mesh["dp"])
        wrapped = model
    elif face == "mesh":
        wrapped = px.DistributedDataParallel(model, device_mesh=mesh["dp"])
    else:
        wrapped = px.DistributedDataParallel(model, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)
    with no_conversions():
        losses = train(wrapped, optimizer, mesh, range(NUM_STEPS))
    held = model.state_dict()
    assert isinstance(held["blocks.0.up.weight"], DTensor) and held["blocks.0.up.weight"].placements[0].is_shard(0)
    assert isinstance(model.blocks[1].down.weight.grad, DTensor)
    assert model.blocks[1].down.weight.grad.placements == model.blocks[1].down.weight.placements
    if path:
        state, optimizer_state = get_state_dict(model, optimizer)
        checkpoint.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    return losses, whole(model)


def resume(path: str, dp: int, tp: int) -> tuple[list[float], State]:
    mesh = grid(dp, tp)
    model = px.replicate(parallel_transformer(mesh), device_mesh=mesh["dp"])
    optimizer = optimizer_of(model)
    state, optimizer_state = get_state_dict(model, optimizer)
    checkpoint.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    return train(model, optimizer, mesh, range(NUM_STEPS, NUM_STEPS + NUM_MORE)), whole(model)


@pytest.fixture(scope="module")
def one_process() -> list[tuple[float, State]]:
    (steps,) = run_ranks(
        _alone, 1, backend=None, allow_leaks="no collective is in it; torch built for CUDA opens devices"
    )
    assert steps is not None
    return steps


def _alone() -> list[tuple[float, State]]:
    return list(alone(NUM_STEPS + NUM_MORE))


def assert_alike(got: tuple[list[float], State], expected: list[tuple[float, State]]) -> None:
    losses, parameters = got
    torch.testing.assert_close(losses, [loss for loss, _ in expected], rtol=1e-5, atol=0)
    for name, parameter in parameters.items():
        reference = expected[-1][1][name]
        # Relative to the largest of a parameter: single elements pass through zero.
        assert (parameter - reference).abs().max() <= 1e-5 * reference.abs().max(), name


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_transformer_trains_as_in_one_process_and_resumes_in_other_meshes(
    backend: str, tmp_path: Path, one_process: list[tuple[float, State]]
) -> None:
    path = str(tmp_path / "checkpoint")
    trained = run_ranks(train_and_save, 4, path, "replicate", backend=backend, allow_leaks=KEEPS)
    for got in trained:
        assert got is not None
        assert_alike(got, one_process[:NUM_STEPS])
    for dp, tp in (4, 1), (1, 4):
        for got in run_ranks(resume, 4, path, dp, tp, backend=backend, allow_leaks=KEEPS):
            assert got is not None
            assert_alike(got, one_process[NUM_STEPS:])


@pytest.mark.parametrize("face", ["mesh", "group"])
def test_ddp_trains_it_as_in_one_process(face: str, one_process: list[tuple[float, State]]) -> None:
    for got in run_ranks(train_and_save, 4, "", face, allow_leaks=KEEPS):
        assert got is not None
        assert_alike(got, one_process[:NUM_STEPS])
