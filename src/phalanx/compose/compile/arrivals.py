"""Gradients that arrive inside of a graph of compiled autograd: an operator that the graph calls in the place of a hook.

The graph sees an operator with an effect: it keeps its place and its order, and needs no graph break. What it does is to
call the hook. A ``.grad`` that the graph sets is set when the graph is over, so the hook is shown the gradient in its place
for the time of the call. A ``.grad`` that lies in a bucket, and that the graph adds to, is written when the graph is over
as well: the hook is called then, in `finish`, or else its bucket would be on its way by that time.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from phalanx.api import engines
from phalanx.reducer import grad_hooks

_Hook = Callable[[torch.Tensor], None]
_keys = itertools.count()
_hooks: dict[int, weakref.ref[FunctionType]] = {}
_parameters: dict[int, weakref.ref[torch.Tensor]] = {}
_late: list[tuple[int, int]] = []  # the pass, and whose hook
_in_capture = False
_library: list[torch.library.Library] = []


def give_twin(parameter: torch.Tensor, hook: FunctionType) -> None:
    """Let the compiler, where it would look into this hook, see a call of the operator instead."""
    key = next(_keys)
    _hooks[key] = weakref.ref(hook, lambda _: (_hooks.pop(key, None), _parameters.pop(key, None)))
    _parameters[key] = weakref.ref(parameter)

    def arrives_in_graph(parameter: torch.Tensor) -> None:
        torch.ops.phalanx.gradient_arrived(parameter.grad, key)

    hook._torchdynamo_inline = arrives_in_graph  # type: ignore[attr-defined]


def define() -> None:
    """Called once, when the compiler is loaded."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    library = torch.library.Library("phalanx", "FRAGMENT")
    library.define("gradient_arrived(Tensor gradient, int key) -> ()")
    library.impl("gradient_arrived", _arrived, "CompositeExplicitAutograd")
    torch.library.register_fake("phalanx::gradient_arrived", _captured, lib=library)
    _register_effectful_op(torch.ops.phalanx.gradient_arrived.default, _EffectType.ORDERED)
    _library.append(library)


def _captured(gradient: torch.Tensor, key: int) -> None:
    """The operator has become part of a graph."""
    global _in_capture
    _in_capture = True


def seen_in_capture() -> bool:
    """Whether the graph that is being captured has such arrivals; asked once for each."""
    global _in_capture
    seen, _in_capture = _in_capture, False
    return seen


def _arrived(gradient: torch.Tensor, key: int) -> None:
    found, parameter = _find(key)
    if found is None or parameter is None:
        return
    before = parameter.grad
    if before is not None and engines.in_bucket(parameter, before):
        _late.append((grad_hooks.current_pass(), key))
        grad_hooks.compiled_pass_open = True
        return
    parameter.grad = gradient
    try:
        found(parameter)
    finally:
        if before is not None:  # the graph has added to it, and writes it at its end
            parameter.grad = before


def finish() -> None:
    """The graph is over, and every ``.grad`` is what it is to be: call the hooks that have waited for that."""
    late = [key for number, key in _late if number == grad_hooks.current_pass()]
    _late.clear()  # with those of a pass that was broken off
    for key in late:
        found, parameter = _find(key)
        if found is not None and parameter is not None:
            found(parameter)


def _find(key: int) -> tuple[Any, torch.Tensor | None]:
    hook, parameter = _hooks.get(key), _parameters.get(key)
    return (None if hook is None else hook()), (None if parameter is None else parameter())
