"""What gradients of DTensors go through on their way: partial sums, accumulation, unused parameters, hooks, clipping."""

from __future__ import annotations

import pytest
import torch
from tests.ranks.tensor_parallel_model import KEEPS, grid, mlp_over
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import phalanx as px
from phalanx.compose.tensor_parallel import clip_grad_norm_, optimizer_groups
from phalanx.testing import ranks, run_ranks

FACES = ["replicate", "ddp", "ddp views"]


def wrapped(model: nn.Module, mesh: DeviceMesh, face: str, **options: object) -> nn.Module:
    if face == "replicate":
        return px.replicate(model, device_mesh=mesh["dp"])
    return px.DistributedDataParallel(
        model, device_mesh=mesh["dp"], gradient_as_bucket_view=face == "ddp views", **options
    )


def plain_mlp() -> nn.Sequential:
    return mlp_over(None)


def inputs(step: int, *, num: int = 8) -> torch.Tensor:
    return torch.randn(num, 6, generator=torch.Generator().manual_seed(step))


def mine(batch: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None, name
            continue
        assert type(parameter.grad) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor), name
        if isinstance(parameter, DTensor):
            assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(whole(parameter.grad), expected.grad, msg=lambda text, name=name: f"{name}: {text}")


class Sequences(nn.Module):
    """A norm on pieces of the sequence: the gradient of its weight is a partial sum on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.first(x).tanh())))


SEQUENCE_PLAN = {
    "first": ColwiseParallel(),
    "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


@pytest.mark.parametrize("face", FACES)
@ranks(4, allow_leaks=KEEPS)
def test_partial_sums_are_added_up_over_their_own_axis(face: str) -> None:
    mesh = grid(2, 2)
    model, reference = Sequences(), Sequences()
    parallelize_module(model, mesh["tp"], SEQUENCE_PLAN)
    seen = []
    model.norm.weight.register_hook(lambda gradient: seen.append(gradient.placements))
    run = wrapped(model, mesh, face)
    for step in range(3):
        batch = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(step))
        for each in model, reference:
            each.zero_grad()
        run(mine(batch, mesh)).square().mean().backward()
        reference(batch).square().mean().backward()
        assert_gradients(model, reference)
    assert seen[0][0].is_partial()  # or this shows nothing


@pytest.mark.parametrize("face", FACES)
@ranks(4, allow_leaks=KEEPS)
def test_accumulated_kept_and_zeroed(face: str) -> None:
    mesh = grid(2, 2)
    model, reference = mlp_over(mesh["tp"]), plain_mlp()
    run = wrapped(model, mesh, face)
    for step in range(4):
        for each in model, reference:
            each.zero_grad(set_to_none=step % 2 == 0)
        with px.no_sync(model) if face == "replicate" else run.no_sync():
            run(mine(inputs(step), mesh)).square().mean().backward()
        run(mine(inputs(step + 50), mesh)).square().mean().backward()
        for seed in step, step + 50:
            reference(inputs(seed)).square().mean().backward()
        assert_gradients(model, reference)


@pytest.mark.parametrize("face", FACES)
@ranks(4, allow_leaks=KEEPS)
def test_unused_in_one_row_or_in_both(face: str) -> None:
    class Choice(nn.Module):
        def __init__(self, mesh: DeviceMesh | None) -> None:
            super().__init__()
            self.a, self.b = mlp_over(mesh), mlp_over(mesh)

        def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
            return sum(getattr(self, branch)(x) for branch in branches)

    mesh = grid(2, 2)
    model, reference = Choice(mesh["tp"]), Choice(None)
    run = wrapped(model, mesh, face, **({} if face == "replicate" else {"find_unused_parameters": True}))
    row = mesh["dp"].get_local_rank()
    for step, branches in enumerate([("ab", "ab"), ("a", "b"), ("a", "a"), ("ab", "b"), ("b", "b")]):
        for each in model, reference:
            each.zero_grad()
        run(mine(inputs(step), mesh), branches[row]).square().mean().backward()
        for part, branch in zip(inputs(step).chunk(2), branches, strict=True):
            (reference(part, branch).square().mean() / 2).backward()
        assert_gradients(model, reference)


@ranks(4, allow_leaks=KEEPS)
def test_weights() -> None:
    mesh = grid(2, 2)
    model, reference = px.replicate(mlp_over(mesh["tp"]), device_mesh=mesh["dp"]), plain_mlp()
    row = mesh["dp"].get_local_rank()
    for step in range(4):
        sizes = (2, 6) if step % 2 else (5, 3)
        for each in model, reference:
            each.zero_grad()
        part = inputs(step).split(sizes)[row]
        px.weight(model, len(part))
        model(part).square().mean().backward()
        reference(inputs(step)).square().mean().backward()
        assert_gradients(model, reference)


@ranks(4, allow_leaks=KEEPS)
def test_a_layer_used_more_often_than_before() -> None:
    """Its gradient arrives again when the bucket has left: the second round is for parts, too."""
    mesh = grid(2, 2)
    model, reference = px.replicate(mlp_over(mesh["tp"]), device_mesh=mesh["dp"], bucket_bytes=64), plain_mlp()
    for step, times in enumerate([1, 1, 3, 2, 1]):
        for each in model, reference:
            each.zero_grad()
        for each, x in (model, mine(inputs(step), mesh)), (reference, inputs(step)):
            total = sum(
                torch.utils.checkpoint.checkpoint(each, x * (1 + time), use_reentrant=True)
                if time
                else each(x.requires_grad_())
                for time in range(times)
            )
            total.square().mean().backward()
        assert_gradients(model, reference)


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
@ranks(4, allow_leaks=KEEPS)
def test_a_communication_hook_gets_the_parts(hook: str) -> None:
    mesh = grid(2, 2)
    model, reference = mlp_over(mesh["tp"]), plain_mlp()
    run = px.DistributedDataParallel(model, device_mesh=mesh["dp"])
    if hook == "fp16":
        run.register_comm_hook(mesh.get_group("dp"), default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(mesh.get_group("dp"), matrix_approximation_rank=8, start_powerSGD_iter=2)
        run.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(4):
        for each in model, reference:
            each.zero_grad()
        run(mine(inputs(step), mesh)).square().mean().backward()
        reference(inputs(step)).square().mean().backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(whole(parameter.grad), expected.grad, rtol=2e-2, atol=2e-3)


@ranks(4, allow_leaks=KEEPS)
def test_clipping_and_optimizers() -> None:
    """torch's functions where all are DTensors, ours where some are; foreach in both cases."""
    mesh = grid(2, 2)
    for every in False, True:
        for make, options in (torch.optim.AdamW, {"foreach": True}), (torch.optim.SGD, {"momentum": 0.9}):
            model, reference = mlp_over(mesh["tp"]), plain_mlp()
            if every:
                model, reference = model[:3], reference[:3]
            px.replicate(model, device_mesh=mesh["dp"])
            assert any(not isinstance(p, DTensor) for p in model.parameters()) is not every
            params = model.parameters() if every else optimizer_groups(model.parameters(), lr=0.01)
            optimizers = make(params, lr=0.01, **options), make(reference.parameters(), lr=0.01, **options)
            for step in range(3):
                model(mine(inputs(step), mesh)).square().mean().backward()
                reference(inputs(step)).square().mean().backward()
                clip = torch.nn.utils.clip_grad_norm_ if every else clip_grad_norm_
                norm = whole(clip(model.parameters(), 0.1))
                expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                torch.testing.assert_close(norm, expected)
                assert_gradients(model, reference)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for parameter, one in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(whole(parameter), one, rtol=1e-4, atol=1e-5)
            px.unreplicate(model)


@ranks(4, allow_leaks=KEEPS)
def test_precision_steps_in_backward_and_buffers() -> None:
    mesh = grid(2, 2)
    model = px.replicate(
        mlp_over(mesh["tp"]), device_mesh=mesh["dp"], precision=px.Precision(param_dtype=torch.bfloat16)
    )
    before = [whole(p).clone() for p in model.parameters()]
    model(mine(inputs(0), mesh)).float().square().mean().backward()
    reference = plain_mlp()
    reference(inputs(0)).square().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad.dtype is torch.float32 and parameter.dtype is torch.float32
        torch.testing.assert_close(whole(parameter.grad), expected.grad, rtol=0.1, atol=0.02)
    assert all(torch.equal(whole(p), old) for p, old in zip(model.parameters(), before, strict=True))

    model = mlp_over(mesh["tp"])
    part = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
    model.register_buffer("spread", part)
    px.replicate(model, device_mesh=mesh["dp"])
    px.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = plain_mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        with torch.no_grad():
            model.spread += mesh["dp"].get_local_rank() + 1  # only the first row's counts
        model(mine(inputs(step), mesh)).square().mean().backward()
        reference(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter, one in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), one)
    assert isinstance(model.spread, DTensor) and torch.equal(whole(model.spread), torch.arange(4.0) + 3)


@ranks(4, allow_leaks=KEEPS)
def test_a_row_that_ran_out_is_given_the_others_state() -> None:
    mesh = grid(2, 2)
    model = px.replicate(mlp_over(mesh["tp"]), device_mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    reference = plain_mlp()
    alone = torch.optim.Adam(reference.parameters(), lr=0.01)
    num_batches = 4 if mesh["dp"].get_local_rank() else 2
    for step in px.join(model, optimizer).over(list(range(num_batches))):
        model(mine(inputs(step), mesh)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(4):
        reference(inputs(step) if step < 2 else inputs(step).chunk(2)[1]).square().mean().backward()
        alone.step()
        alone.zero_grad()
    for parameter, one in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), one)
        held = optimizer.state[parameter]["exp_avg"]
        assert type(held) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
        torch.testing.assert_close(whole(held), alone.state[one]["exp_avg"])


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_rank_0_of_the_axis_gives_its_values(backend: str) -> None:
    run_ranks(_initial_values, 4, backend=backend, allow_leaks=KEEPS)


def _initial_values() -> None:
    mesh = grid(2, 2)
    model = mlp_over(mesh["tp"], seed=mesh["dp"].get_local_rank())
    with torch.no_grad():
        for parameter in model[:3].parameters():
            parameter.mul_(1 + mesh["dp"].get_local_rank())
    px.replicate(model, device_mesh=mesh["dp"])
    for parameter, expected in zip(model.parameters(), plain_mlp().parameters(), strict=True):
        torch.testing.assert_close(whole(parameter), expected.detach(), rtol=0, atol=0)
