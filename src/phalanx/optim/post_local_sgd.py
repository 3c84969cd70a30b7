"""Post-local SGD: an optimizer that steps on this rank's gradients, and averages parameters when that is due."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.distributed.optim.post_localSGD_optimizer import PostLocalSGDOptimizer as TorchPostLocalSGDOptimizer
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class PostLocalSGDOptimizer(TorchPostLocalSGDOptimizer):
    """Wraps an optimizer and an averager: torch's class, with its arguments and its checkpoints.

    Each `step` is the wrapped optimizer's, followed by `averager.average_parameters`. All ranks step alike. It holds no
    state of its own: parameter groups, state and step hooks are the wrapped optimizer's, also after a reload.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}")
        if not callable(getattr(averager, "average_parameters", None)):
            raise TypeError(
                "averager must be a model averager, such as phalanx.PeriodicModelAverager(period=4); "
                f"got {type(averager).__name__}"
            )
        self.optim = optim
        self.averager = averager

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        # Looked up each time: loading a checkpoint gives the wrapped optimizer a new list, and a scheduler that wrote
        # learning rates into the old one would have no effect.
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with the averager's step under ``"step"``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a checkpoint, so that averaging goes on in its rhythm. One without a step starts that anew."""
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.optim.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        """Runs after the wrapped optimizer's step, before parameters are averaged."""
        return self.optim.register_step_post_hook(hook)
