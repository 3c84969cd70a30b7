"""`step_in_backward`: an ordinary optimizer, stepped by the backward pass that averages the gradients."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from phalanx.api.replica import replica_of
from phalanx.errors import MismatchError
from phalanx.optim.in_backward import StepInBackward, keep, problem_with_parameters
from phalanx.reducer.reducer import Reducer

AGREE_WITHIN_S = 600.0


def step_in_backward(
    module: nn.Module,
    optimizer: Optimizer,
    *,
    free_gradients: bool = True,
    before_step: Callable[[], object] | None = None,
) -> StepInBackward:
    """Let every synchronised backward pass of this module end in a step of this optimizer.

    The optimizer stays what it is: its `state_dict`, parameter groups and learning-rate schedulers work as ever, and it
    steps once per step of the ranks, on averages, after all of backward; an ``optimizer.step()`` of yours that is left in
    the loop is an error. Passes under `no_sync` only accumulate. A
    parameter that no rank used has no gradient and is not stepped. If a rank fails in backward, no rank steps.

    Every rank calls this at the same point, alike: the ranks compare. A rank that has no backward pass in some step
    calls `phalanx.synchronize(module)` in its place; there is no optimizer step of its own that would do so.

    Args:
        module: a replicated module, or a `DistributedDataParallel`.
        optimizer: over parameters of this module, some or all. Several may be given, one after the other.
        free_gradients: whether `.grad` is None again after the step; otherwise it holds the average until `zero_grad`.
        before_step: called with all averages in place, for clipping or logging.

    Returns:
        what steps: `.remove()` ends it.
    """
    engine = _engine_of(module)
    problem = _problem_with(module, optimizer, free_gradients, before_step)
    try:
        _agree(engine, module, optimizer, free_gradients, None if problem is None else str(problem))
        if problem is not None:
            raise problem
    finally:
        problem = None  # an error that leads to itself, by its traceback, would keep the module for a while
    stepping = StepInBackward(
        engine, optimizer, free_gradients=free_gradients, before_step=before_step, refuses_others=True
    )
    keep(module, stepping)
    return stepping


def _engine_of(module: nn.Module) -> Reducer:
    engine = getattr(module, "_engine", None)
    return engine if isinstance(engine, Reducer) else replica_of(module).reducer


def _problem_with(
    module: nn.Module, optimizer: object, free_gradients: object, before_step: object
) -> ValueError | TypeError | None:
    if not isinstance(optimizer, Optimizer):
        return TypeError(f"step_in_backward takes a torch.optim.Optimizer, made; got {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        return ValueError("LBFGS runs backward passes itself, in a closure: it cannot be stepped by one")
    if not isinstance(free_gradients, bool):
        return TypeError(f"free_gradients must be True or False, got {free_gradients!r}")
    if before_step is not None and not callable(before_step):
        return TypeError(f"before_step must be a function without arguments, got {before_step!r}")
    return problem_with_parameters(module, optimizer)


def _agree(engine: Reducer, module: nn.Module, optimizer: Optimizer, free_gradients: bool, problem: str | None) -> None:
    """Raise on every rank if they do not all step alike: their parameters would drift apart in silence."""
    mine: dict[str, object] = {"problem": problem}
    if problem is None:
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        mine["optimizer"] = type(optimizer).__name__
        mine["parameters"] = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        mine["free_gradients"] = free_gradients
    payload = json.dumps(mine).encode()
    said = [json.loads(part) for part in engine.group.exchange("step in backward", payload, timeout_s=AGREE_WITHIN_S)]
    if problem is not None:
        return  # the caller raises its own
    for rank, theirs in enumerate(said):
        if theirs["problem"] is not None:
            raise MismatchError(
                f"rank {rank} could not let its optimizer step in backward: {theirs['problem']}", rank=engine.group.rank
            )
        different = [key for key in mine if mine[key] != theirs[key]]
        if different:
            key = different[0]
            raise MismatchError(
                f"rank {engine.group.rank} (here) and rank {rank} (there) step differently in backward: the "
                f"{key.replace('_', ' ')}: here {mine[key]}, there {theirs[key]}",
                rank=engine.group.rank,
            )
