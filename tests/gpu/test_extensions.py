"""On one GPU: communication hooks, optimizers in backward and `torch.compile`, against torch's DDP.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_extensions.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import _apply_optimizer_in_backward

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import (
    ALONE,
    DEVICE,
    ON_GPU,
    OURS,
    State,
    beyond_the_stand_in,
    compare,
    data,
    gpu,
    main,
    parameters_of,
    run_checks,
    several_gpus,
    torch_ddp,
)

import phalanx as px

pytestmark = gpu


def mlp(width: int = 40) -> nn.Sequential:
    torch.manual_seed(4)
    layers: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(3):
        layers += [nn.Tanh(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 3)).to(DEVICE)


def backward(model: nn.Module, step: int) -> None:
    model(data(dist.get_rank(), step, 6, 40)).square().mean().backward()


def trained(model: nn.Module, module: nn.Module, *, steps: int = 8) -> State:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return parameters_of(module)


# -- hooks -------------------------------------------------------------------------------------------------------------


def halved_in_steps(state, bucket):  # without annotations: torch takes them as text here, and refuses them
    """A user's hook with two collectives and work of its own between them, each behind the other's future."""
    flat = bucket.buffer().div_(dist.get_world_size())
    first = dist.all_reduce(flat, async_op=True).get_future()

    def then(future):
        whole = future.value()[0]
        norm = whole.float().abs().max()  # whatever the order of the gradients in it
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return whole.mul_(0.5).add_(norm, alpha=1e-3)

    return first.then(then)


def per_gradient(state, bucket):
    """One that looks at gradients and parameters, and is done when it returns."""
    assert len(bucket.gradients()) == len(bucket.parameters())
    for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
        assert gradient.shape == parameter.shape and gradient.device == parameter.device
    flat = bucket.buffer()
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


def bfloat16(state, bucket):
    """Under its own name torch refuses this one without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (default_hooks.allreduce_hook, None),
    "fp16": lambda: (default_hooks.fp16_compress_hook, None),
    "bf16": lambda: (bfloat16, None),
    "fp16 wrapper": lambda: (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), None),
    "power": lambda: (
        powerSGD_hook.powerSGD_hook,
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, min_compression_rate=0.5),
    ),
    "user's, in steps": lambda: (halved_in_steps, None),
    "user's, per gradient": lambda: (per_gradient, None),
}


@beyond_the_stand_in("torch's built-in hooks divide in a thread of Gloo's", on="gloo")
def check_hooks() -> None:
    for name, make in HOOKS.items():

        def run(which: str, make: Callable[[], tuple[Any, Any]] = make) -> State:
            hook, state = make()
            module = mlp()
            if which == "replicate":
                model: nn.Module = px.replicate(module)
                px.register_hook(model, hook, state=state)
            else:
                model = torch_ddp(module) if which == "torch" else OURS[which](module)
                model.register_comm_hook(state, hook)  # type: ignore[operator]
            return trained(model, module)

        # Those that look at a bucket as a whole see other buckets where these are smaller.
        compare(
            run, ["replicate", "ddp"] if name in ("power", "user's, in steps") else ["replicate", "ddp", "ddp, views"]
        )


# -- optimizers in backward --------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}


def check_optimizers_in_backward() -> None:
    for cls, options in OPTIMIZERS.values():

        def run(way: str, cls: Any = cls, options: dict[str, Any] = options) -> State:
            module = mlp()
            if way == "torch":
                model = torch_ddp(module)
                optimizer = cls(module.parameters(), **options)
                for step in range(8):
                    optimizer.zero_grad()
                    backward(model, step)
                    optimizer.step()
                return parameters_of(module)
            face, _, kind = way.partition(": ")
            if kind == "apply":
                _apply_optimizer_in_backward(cls, module.parameters(), options)
            model = OURS[face](module)
            if kind == "fused":
                model._register_fused_optim(cls, **options)  # type: ignore[operator]
            if kind == "step_in_backward":
                px.step_in_backward(model, cls(module.parameters(), **options))
            for step in range(8):
                backward(model, step)
                if kind == "fused":
                    model.zero_grad()
            return parameters_of(module)

        ways = [f"{face}: step_in_backward" for face in ("replicate", "replicate, small buckets", "ddp", "ddp, views")]
        ways += ["ddp: fused", "ddp: apply", "ddp, views: apply", "replicate: apply"]
        # An optimizer with all parameters steps them in one kernel, which may contract to other instructions.
        compare(run, ways, close={} if ON_GPU else None)


# -- compile -----------------------------------------------------------------------------------------------------------


def compiled(which: str, backend: str, *, inside: bool) -> State:
    torch._dynamo.reset()
    module = mlp()
    used = torch.compile(module, backend=backend) if inside else module
    model = torch_ddp(used) if which == "torch" else OURS[which](used)
    run = model if inside else torch.compile(model, backend=backend)
    return trained(run, module, steps=6)


def check_compiled_by_aot_eager() -> None:
    for inside in (True, False):
        faces = [
            "replicate",
            "replicate, small buckets",
            "ddp",
        ]  # torch's compiler refuses caps below those of the first
        compare(lambda which, inside=inside: compiled(which, "aot_eager", inside=inside), faces)


def check_compiled_by_inductor() -> None:
    try:
        torch._dynamo.reset()
        torch.compile(nn.Linear(2, 2).to(DEVICE), backend="inductor")(torch.ones(1, 2, device=DEVICE)).sum().backward()
    except Exception as error:  # no Triton, or no C++ compiler
        print(f"  inductor does not work here ({type(error).__name__}): not checked", flush=True)
        return
    compare(
        lambda which: compiled(which, "inductor", inside=True), ["replicate", "ddp"], close={"rtol": 1e-4, "atol": 1e-5}
    )
    compare(
        lambda which: compiled(which, "inductor", inside=False),
        ["replicate", "ddp"],
        close={"rtol": 1e-4, "atol": 1e-5},
    )


CHECKS = [
    check_hooks,
    check_optimizers_in_backward,
    check_compiled_by_aot_eager,
]


def test_alone_on_nccl() -> None:
    run_checks([*CHECKS, check_compiled_by_inductor], world_size=1, backend=ALONE)


def test_two_ranks_on_gloo() -> None:
    run_checks(CHECKS, world_size=2, backend="gloo")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(test_alone_on_nccl, test_two_ranks_on_gloo, test_two_ranks_on_nccl)
