"""Optimizers that were asked to step in backward: they must wait for the averages, so they step at its end."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from phalanx.reducer.reducer import Reducer
from phalanx.reducer.unused import Report


def step_after_averaging(engine: Reducer, parameters: Sequence[nn.Parameter]) -> None:
    """Take over what `_apply_optimizer_in_backward` has set up: left alone, each rank would step on its own gradients.

    As with torch, a gradient is gone once its optimizer has stepped.
    """
    if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()

    def step(_: Report) -> None:
        for (
            slot
        ) in engine.slots:  # not the parameters themselves: the engine would keep them, and their hooks the engine
            parameter = slot.ref()
            if parameter is not None and hasattr(parameter, "_in_backward_optimizers"):
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None

    engine.on_report.append(step)
