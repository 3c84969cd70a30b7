"""Every hook that torch ships, unchanged on our DDP and on replicated modules: bit for bit what torch's class gives."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim  # here: inside a group its import keeps that alive
from tests.ranks.replicas import batch, equal_on_all_ranks, gradients, mlp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.optim.utils import as_functional_optim
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.testing import run_ranks

both_backends = pytest.mark.parametrize("backend", ["gloo", "phalanx"])
two_and_three = pytest.mark.parametrize("world", [2, 3])
STEPS = (
    "an optimizer in a hook's state holds the parameters, whose hooks lead to the hook: torch's class keeps that circle"
)
KINDS = ("torch", "ddp", "replicate")
Group = dist.ProcessGroup


def wrapped(kind: str, group: Group, hook: Any, state: Any, **options: Any) -> nn.Module:
    if kind == "replicate":
        model = px.replicate(mlp(), process_group=group)
        px.register_hook(model, hook, state=state)
        return model
    ddp = (TorchDDP if kind == "torch" else px.DistributedDataParallel)(mlp(), process_group=group, **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, TorchDDP) else model


def backward(model: nn.Module, step: int) -> None:
    model(batch(dist.get_rank(), step)).square().mean().backward()


def power(group: Group, **options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


def bfloat16(state, bucket):  # without annotations: torch takes them as text here, and refuses them
    """Under its own name torch refuses it where there is no NCCL, and so do we; Gloo and ours can do it."""
    return default_hooks.bf16_compress_hook(state, bucket)


def local(group: Group, **options: Any) -> Any:
    return post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=2, **options)


HOOKS: dict[str, Callable[[Group], tuple[Any, Any]]] = {
    "allreduce": lambda g: (default_hooks.allreduce_hook, g),
    "fp16": lambda g: (default_hooks.fp16_compress_hook, g),
    "fp16 wrapper": lambda g: (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), g),
    "bf16": lambda g: (bfloat16, g),
    "noop": lambda g: (debugging_hooks.noop_hook, None),
    "power": lambda g: (powerSGD_hook.powerSGD_hook, power(g)),
    "power rank 2, cold, no feedback": lambda g: (
        powerSGD_hook.powerSGD_hook,
        power(g, matrix_approximation_rank=2, warm_start=False, use_error_feedback=False),
    ),
    "power in fp16": lambda g: (default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook), power(g)),
    "local": lambda g: (post_localSGD_hook.post_localSGD_hook, local(g)),
    "local without": lambda g: (post_localSGD_hook.post_localSGD_hook, local(g, post_local_gradient_allreduce=False)),
    "quantization": lambda g: (quantization_hooks.quantization_pertensor_hook, g),
}


def train_with(which: str) -> None:
    models = []
    for kind in KINDS:
        group = dist.new_group()
        hook, state = HOOKS[which](group)
        models.append(wrapped(kind, group, hook, state))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    for step in range(5):
        seen = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, step)
            seen.append(gradients(bare(model)))
            optimizer.step()
        for name, theirs in seen[0].items():
            assert torch.equal(seen[1][name], theirs), f"{which}, DDP: {name} in step {step}"
            # Its buckets are laid out in another order, so that three ranks' values are added up in another order.
            loose = 0.02 if "16" in which else 1e-4
            close = {"rtol": 0, "atol": 0} if dist.get_world_size() == 2 else {"rtol": loose, "atol": loose / 10}
            what = f"{which}, replicate: {name} in step {step}: "
            torch.testing.assert_close(seen[2][name], theirs, msg=lambda text, what=what: what + text, **close)
    averaged = which not in ("noop", "local without")
    assert all(equal_on_all_ranks(parameter) for parameter in models[2].parameters()) == averaged


def every_hook(backend: str) -> None:
    for which in HOOKS:
        if which == "quantization" and backend == "gloo":
            quantization_fails()  # torch's own class aborts the process, so it is not run here
        else:
            train_with(which)


@both_backends
@two_and_three
def test_torchs_hooks(world: int, backend: str) -> None:
    run_ranks(every_hook, world, backend, backend=backend)


def quantization_fails() -> None:
    """It indexes what Gloo's all_gather does not return: an error, named after the hook, and no rank hangs."""
    for kind in KINDS[1:]:
        group = dist.new_group()
        model = wrapped(kind, group, quantization_hooks.quantization_pertensor_hook, group)
        with pytest.raises(RuntimeError, match="IndexError") as caught:
            backward(model, 0)
        assert "quantization_pertensor_hook" in caught.value.__notes__[0]
        del caught
        torch.zeros((), requires_grad=True).backward()


# -- several buckets ------------------------------------------------------------------------------------------------------


def several_buckets(which: str) -> None:
    """Torch's own class hangs on several buckets whose hooks start further collectives; ours take turns."""
    small = {"bucket_bytes": 160, "first_bucket_bytes": 64}
    group = dist.new_group()
    hook, state = HOOKS[which](group)
    model = px.replicate(mlp(), **small)
    px.register_hook(model, hook, state=state)
    plain = px.replicate(mlp(), **small)
    for step in range(5):
        for one in (model, plain):
            one.zero_grad()
            backward(one, step)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert equal_on_all_ranks(mine.grad)
            close = {"rtol": 0.05, "atol": 0.05} if "fp16" in which or "bf16" in which else {"rtol": 1e-5, "atol": 1e-6}
            if step < 2 or "power" not in which:
                torch.testing.assert_close(mine.grad, other.grad, **close)


def hooks_on_several_buckets() -> None:
    for which in ("allreduce", "bf16", "power", "power in fp16"):
        several_buckets(which)


@both_backends
def test_several_buckets_on_a_replicated_module(backend: str) -> None:
    run_ranks(hooks_on_several_buckets, 3, backend=backend)


# -- hooks that step ------------------------------------------------------------------------------------------------------


def optimizer_in_hook() -> None:
    models = []
    for kind in KINDS:
        group = dist.new_group()
        functional = as_functional_optim(torch.optim.SGD, lr=0.05, momentum=0.9)
        stepping = optimizer_overlap_hooks._OptimizerHookState(functional)
        hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, stepping)
        models.append(wrapped(kind, group, hook, group))
    for step in range(4):
        for model in models:
            model.zero_grad()
            backward(model, step)
        for theirs, mine, replicated in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(replicated, theirs)
    assert not torch.equal(next(models[0].parameters()), next(mlp().parameters()))


@both_backends
@two_and_three
def test_a_hook_that_steps_an_optimizer(world: int, backend: str) -> None:
    run_ranks(optimizer_in_hook, world, backend=backend, allow_leaks=STEPS)


def zero_in_hook(interleaved: bool) -> None:
    """ZeRO overlapped with backward. Torch refuses Gloo, where its way of doing it hangs; our group is not refused."""
    wrap = ddp_zero_hook.hook_with_zero_step_interleaved if interleaved else ddp_zero_hook.hook_with_zero_step
    models = []
    for cls in (TorchDDP, px.DistributedDataParallel):
        group = dist.new_group()
        model = cls(mlp(), process_group=group, gradient_as_bucket_view=True)
        zero = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, lr=0.05
        )
        model.register_comm_hook(group, wrap(default_hooks.allreduce_hook, model, zero))
        models.append(model)
    for step in range(6):
        for model in models:
            model.zero_grad()
            backward(model, step)
        for theirs, mine in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(mine, theirs), step
    assert not torch.equal(next(models[1].parameters()), next(mlp().parameters()))


def zero_in_hooks() -> None:
    for interleaved in (False, True):
        zero_in_hook(interleaved)


@two_and_three
def test_zero_in_a_hook(world: int) -> None:
    run_ranks(zero_in_hooks, world, backend="phalanx", allow_leaks=STEPS)


# -- state ----------------------------------------------------------------------------------------------------------------


def through_a_checkpoint(kind: str) -> list[torch.Tensor]:
    """The parameters after some compressed steps, a checkpoint of the model and the hook's state, and more steps."""
    through = wrapped(kind, dist.group.WORLD, powerSGD_hook.powerSGD_hook, kept := power(None))
    optimizer = torch.optim.SGD(through.parameters(), lr=0.05)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()

    for number in range(4):
        step(through, optimizer, number)
    file = io.BytesIO()
    torch.save({"model": bare(through).state_dict(), "hook": kept}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert saved["hook"].iter == kept.iter and saved["hook"].error_dict.keys() == kept.error_dict.keys()
    resumed = wrapped(kind, dist.group.WORLD, powerSGD_hook.powerSGD_hook, saved["hook"])
    bare(resumed).load_state_dict(saved["model"])
    again = torch.optim.SGD(resumed.parameters(), lr=0.05)
    for number in range(4, 7):
        step(resumed, again, number)
    return [parameter.detach() for parameter in resumed.parameters()]


def through_checkpoints() -> None:
    """The saved errors are by bucket, and buckets are laid out anew: what they are added to differs on a fresh module.

    With DDP that is as with torch; replicate's buckets have an order of their own, so there it is that ranks stay alike.
    """
    theirs, mine, replicated = (through_a_checkpoint(kind) for kind in KINDS)
    for a, b, c in zip(theirs, mine, replicated, strict=True):
        assert torch.equal(a, b)
        assert equal_on_all_ranks(c)


@both_backends
@two_and_three
def test_power_sgd_goes_on_from_its_checkpoint(world: int, backend: str) -> None:
    run_ranks(through_checkpoints, world, backend=backend)
