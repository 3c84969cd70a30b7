"""Averagers: when parameters are averaged over the ranks. Here the plain one, every so many steps."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import averagers as torch_averagers

from phalanx.comm.c10d import group_of
from phalanx.optim.averaging import Parameters, average_parameters


class ModelAverager(torch_averagers.ModelAverager):
    """Counts steps and averages parameters in those that are due. Every rank calls it once per step, at one point."""

    process_group: dist.ProcessGroup
    step: int

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is None:
            process_group = dist.group.WORLD if dist.is_initialized() else None
            if process_group is None:
                raise RuntimeError(
                    "there is no process group to average over: call phalanx.init() (or init_process_group) before "
                    "making an averager"
                )
        self.process_group = process_group
        self.step = 0

    def average_parameters(self, params: Parameters) -> None:
        """Average now if this step is one in which that is due; then count the step.

        Takes a model's parameters or an optimizer's parameter groups. Those without a gradient on any rank stay as they
        are. Call it after the optimizer's step and before `zero_grad`.
        """
        group = self.due()
        if isinstance(group, dist.ProcessGroup):  # otherwise none is due, or this rank is not in the group
            average_parameters(params, group_of(group), setting=f"{self!r} at step {self.step}")
        self.step += 1

    @abstractmethod
    def due(self) -> dist.ProcessGroup | None:
        """The group to average over in this step; None in a step without averaging."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on at the same place; the configuration is the constructor's."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint was taken. Every rank loads the same."""
        step = state_dict.get("step") if isinstance(state_dict, dict) else None
        if not isinstance(step, int) or step < 0:
            raise ValueError(
                "an averager's state is {'step': <number of steps so far>}, as its state_dict() gives; "
                f"got {state_dict!r}"
            )
        self.step = step


class PeriodicModelAverager(ModelAverager, torch_averagers.PeriodicModelAverager):
    """Averages every `period` steps, the first time in step `warmup_steps`: torch's class, with its arguments.

    For local SGD: ranks train by themselves in between (`phalanx.no_sync`, or a hook that stays within a host). Every
    rank makes one with equal arguments. The averages are written into the parameters' own memory.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        if warmup_steps < 0:
            raise ValueError(f"Arg ``warmup_steps`` must be a non-negative number. Got {warmup_steps}.")
        if period < 1:
            raise ValueError(f"Arg ``period`` must be a positive value. Got {period}.")
        if period == 1:
            warnings.warn(averaging_every_step("period"), stacklevel=2)
        self.warmup_steps = warmup_steps
        self.period = period

    def due(self) -> dist.ProcessGroup | None:
        since = self.step - self.warmup_steps
        return self.process_group if since >= 0 and since % self.period == 0 else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(period={self.period}, warmup_steps={self.warmup_steps})"


def averaging_every_step(what: str) -> str:
    """A warning that begins as torch's does, which programs filter by."""
    return (
        f"When {what} is 1, no need to use model averaging because the communication cost of averaging parameters in "
        "every step is that of averaging gradients: use DistributedDataParallel or phalanx.replicate alone."
    )
