"""Meshes and DTensors that cannot be averaged over, and torch's own way of mixing the two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.tensor_parallel_model import KEEPS, grid, mlp_over
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform as torch_transform

import phalanx as px
from phalanx.compose.tensor_parallel import pre_dp_module_transform
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.testing import ranks


def wraps(model: nn.Module, face: str, **options: object) -> nn.Module:
    return px.replicate(model, **options) if face == "replicate" else px.DistributedDataParallel(model, **options)


@pytest.mark.parametrize("face", ["replicate", "ddp"])
@ranks(4, allow_leaks=KEEPS)
def test_parameters_that_are_sharded_over_the_axis_to_be_averaged(face: str) -> None:
    mesh = grid(2, 2)
    model = mlp_over(mesh["tp"])
    row = [0, 1] if dist.get_rank() < 2 else [2, 3]
    with pytest.raises(ValueError, match=r"0\.weight is a DTensor, .* over the mesh's axis tp .* averaged over ranks"):
        wraps(model, face, device_mesh=mesh["tp"])
    with pytest.raises(ValueError, match=rf"\(ranks \[{row[0]}, {row[1]}\]\).*\[0, 1, 2, 3\]: they hold different"):
        wraps(model, face)  # all ranks are the default
    both = mlp_over(None)
    both[4].weight = nn.Parameter(distribute_tensor(both[4].weight.detach(), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"4\.weight is a DTensor, .* over the mesh's axis dp"):
        wraps(both, face, device_mesh=mesh["dp"])
    replicated = mlp_over(None)
    replicated[4].weight = nn.Parameter(distribute_tensor(replicated[4].weight.detach(), mesh, [Replicate()] * 2))
    wraps(replicated, face, device_mesh=mesh["dp"])
    wraps(model, face, device_mesh=mesh["dp"])  # nothing that was refused is left behind


@ranks(4, allow_leaks=KEEPS)
def test_meshes_that_are_no_axis() -> None:
    mesh = grid(2, 2)
    with pytest.raises(KeyError, match=r"nope.*dp.*tp"):
        mesh["nope"]
    with pytest.raises(ValueError, match=r"one dimension \(slice it, as in mesh\['dp'\]\)"):
        px.replicate(mlp_over(mesh["tp"]), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):  # torch's words
        px.DistributedDataParallel(mlp_over(mesh["tp"]), device_mesh=mesh)
    for face in "replicate", "ddp":
        with pytest.raises(TypeError, match=r"device_mesh takes a .*DeviceMesh, got str"):
            wraps(mlp_over(mesh["tp"]), face, device_mesh="dp")
    with pytest.raises(ValueError, match="not both"):
        px.replicate(mlp_over(mesh["tp"]), device_mesh=mesh["dp"], process_group=mesh.get_group("dp"))


@ranks(4, allow_leaks=KEEPS)
def test_rows_that_are_not_alike() -> None:
    mesh = grid(2, 2)
    other = nn.Sequential(*mlp_over(None))
    plan = {"0": ColwiseParallel()} if dist.get_rank() < 2 else {}
    parallelize_module(other, mesh["tp"], plan)
    with pytest.raises(MismatchError, match=r"0\.weight.*part of a DTensor of shape \[8, 6\], .* over tp of 2"):
        px.replicate(other, device_mesh=mesh["dp"])
    broken = mlp_over(mesh["tp"])
    if dist.get_rank() < 2:
        broken[4].weight = nn.UninitializedParameter()
        with pytest.raises(ValueError, match="not initialised"):
            px.replicate(broken, device_mesh=mesh["dp"])
    else:
        with pytest.raises(PeerFailedError, match=r"4\.weight is not initialised"):
            px.replicate(broken, device_mesh=mesh["dp"])


@ranks(4, allow_leaks=KEEPS)
def test_a_gradient_that_is_no_dtensor_is_refused() -> None:
    mesh = grid(2, 2)
    model = px.replicate(mlp_over(mesh["tp"]), device_mesh=mesh["dp"])
    model[0].weight.grad = torch.ones(8, 6)
    with pytest.raises(TypeError, match=r"must be a DTensor of the same mesh .*, got a plain tensor"):
        px.synchronize(model)


@pytest.mark.parametrize("transform", ["torch", "phalanx", "both"])
@ranks(4, allow_leaks=KEEPS)
def test_code_that_transforms_the_module_first(transform: str) -> None:
    mesh = grid(2, 2)
    row = mesh["dp"].get_local_rank()
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    model, reference = mlp_over(mesh["tp"]), mlp_over(None)
    if transform != "phalanx":
        torch_transform(model)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    if transform != "torch":
        assert pre_dp_module_transform(model) is None
        assert isinstance(model[0].weight, DTensor) and not model._forward_pre_hooks and not model._forward_hooks
    run = px.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (run, reference)]
    for _ in range(3):
        for each, x, optimizer in zip((run, reference), (batch.chunk(2)[row], batch), optimizers, strict=True):
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    parts = model[0].weight.to_local() if isinstance(model[0].weight, DTensor) else model[0].weight
    expected = reference[0].weight.chunk(2)[mesh["tp"].get_local_rank()]
    torch.testing.assert_close(parts, expected)


@ranks(4, allow_leaks=KEEPS)
def test_what_torch_has_made_local_is_not_replicated_in_silence() -> None:
    mesh = grid(2, 2)
    model = mlp_over(mesh["tp"])
    torch_transform(model)
    with pytest.raises(ValueError, match=r"0\.weight was made local by torch's _pre_dp_module_transform"):
        px.replicate(model, device_mesh=mesh["dp"])
    pre_dp_module_transform(model)
    px.replicate(model, device_mesh=mesh["dp"])
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got int"):
        pre_dp_module_transform(3)
