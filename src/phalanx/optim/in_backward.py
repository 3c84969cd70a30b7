"""Optimizers that step in backward: at its end, when every gradient is an average.

Not as each bucket comes in. Until the last one is there nobody knows whether a rank failed in this pass, whether a
gradient came late, or what the weights of the ranks add up to; a parameter that has stepped cannot be taken back. And a
parameter that is used again further down the graph must not change before that part of backward has run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from phalanx.reducer.reducer import Reducer
from phalanx.reducer.unused import Report

_stepped: weakref.WeakKeyDictionary[Optimizer, weakref.ref[StepInBackward]] = weakref.WeakKeyDictionary()


def is_stepped_in_backward(optimizer: Optimizer) -> bool:
    """Whether backward steps it, and no other may."""
    stepping = _stepped[optimizer]() if optimizer in _stepped else None
    return stepping is not None and stepping.attached


class StepInBackward:
    """An optimizer that a reducer steps, until `remove`. Someone must keep this: the reducer does not.

    From the reducer a reference would lead to the parameters, whose hooks lead back to it through autograd, where the
    garbage collector does not see: neither would ever be freed.
    """

    def __init__(
        self,
        engine: Reducer,
        optimizer: Optimizer,
        *,
        free_gradients: bool,
        before_step: Callable[[], object] | None = None,
        refuses_others: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        """Steps so far."""
        self._free_gradients = free_gradients
        self._before_step = before_step
        self._engine = weakref.ref(engine)
        this = weakref.ref(self)

        def step(_: Report) -> None:
            stepping = this()
            if stepping is not None:
                stepping._step()

        self._action = step
        engine.on_report.append(step)
        self._stepping = False
        self._handle = None
        if refuses_others:
            self._handle = optimizer.register_step_pre_hook(_refuse_of(this))
            _stepped[optimizer] = this

    def _step(self) -> None:
        if self._before_step is not None:
            self._before_step()
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
        self.num_steps += 1
        if self._free_gradients:
            self.optimizer.zero_grad(set_to_none=True)

    @property
    def attached(self) -> bool:
        """Whether backward still steps it."""
        engine = self._engine()
        return engine is not None and self._action in engine.on_report

    def remove(self) -> None:
        """Leave stepping to the user again. All ranks do so."""
        engine = self._engine()
        if engine is not None and self._action in engine.on_report:
            engine.on_report.remove(self._action)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def _refuse_of(this: weakref.ref[StepInBackward]) -> Callable[..., None]:
    """A hook before the optimizer's steps that lets only those pass that backward makes."""

    def refuse(*_: Any) -> None:
        stepping = this()
        if stepping is not None and stepping.attached and not stepping._stepping:
            raise RuntimeError(
                f"this {type(stepping.optimizer).__name__} steps in backward (phalanx.step_in_backward): leave out "
                "optimizer.step(), which would step a second time; or remove() what steps it first"
            )

    return refuse


class _Held(list[StepInBackward]):
    """In a module's own `__dict__`: the module keeps them, and leaves them behind when it is copied."""

    def __deepcopy__(self, _: Any) -> _Held:
        return _Held()

    def __reduce__(self) -> tuple[type[_Held], tuple[()]]:
        return _Held, ()


_HELD = "_phalanx_steps_in_backward"


def keep(module: nn.Module, stepping: StepInBackward) -> None:
    """Let a module keep what steps it."""
    module.__dict__.setdefault(_HELD, _Held()).append(stepping)


def problem_with_parameters(module: nn.Module, optimizer: Optimizer) -> ValueError | None:
    """Why a module's backward cannot step this optimizer, as the error to raise: a parameter of others, or stepped."""
    own = {id(parameter) for parameter in module.parameters()}
    taken = {
        id(parameter)
        for stepping in module.__dict__.get(_HELD, ())
        if stepping.attached
        for group in stepping.optimizer.param_groups
        for parameter in group["params"]
    }
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            which = f"parameter {place} of group {number} (shape {list(parameter.shape)})"
            if id(parameter) not in own:
                return ValueError(
                    f"{which} is not one of this {type(module).__name__}: its gradient may not be ready when this "
                    "module's are. Make an optimizer for each module"
                )
            if id(parameter) in taken:
                return ValueError(f"{which} is already stepped in backward by another optimizer: remove that first")
    return None


def take_over(engine: Reducer, parameters: Sequence[nn.Parameter]) -> None:
    """Step, on averages, the optimizers that torch's `_apply_optimizer_in_backward` has given to parameters.

    Left alone, each rank's would step on its own gradients, or on none. As with torch, a gradient is gone once its
    optimizer has stepped.
    """
    if not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        return
    from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

    for parameter in parameters:
        for handle in param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()

    def step(_: Report) -> None:
        for slot in engine.slots:  # not the parameters themselves: see `StepInBackward`
            parameter = slot.ref()
            if parameter is not None and parameter.grad is not None:
                optimizers = getattr(parameter, "_in_backward_optimizers", ())
                for optimizer in optimizers:
                    optimizer.step()
                if optimizers:
                    parameter.grad = None

    engine.on_report.append(step)
