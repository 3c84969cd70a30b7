"""The forward hooks of a lowered module tree. They are left behind when a module is copied: copies are plain modules."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import nn

from phalanx.api.nested import to_dtype
from phalanx.api.precision import Precision

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Scope(Protocol):
    """What the hooks call: see `Lowering`."""

    policy: Precision

    def enter(self, module: nn.Module) -> bool: ...

    def leave(self, module: nn.Module) -> bool: ...

    def restore_stale(self) -> None: ...


class Inert:
    """What a hook is in a copy of its module."""

    def __call__(self, *_: Any) -> None:
        return None


class _Hook:
    def __deepcopy__(self, _: Any) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


class Enter(_Hook):
    """Before forward. The outermost call of the tree casts its parameters, its buffers and the arguments."""

    def __init__(self, scope: Scope, *, is_root: bool) -> None:
        self._scope = scope
        self._is_root = is_root

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        if torch.compiler.is_compiling():
            # In a compiled graph the casts are inputs, put in place by a caller; the root is what has to do so.
            return _enter_uncompiled(self, module, args, kwargs) if self._is_root else None
        return self.run(module, args, kwargs)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        policy = self._scope.policy
        if self._scope.enter(module) and policy.cast_inputs and policy.param_dtype is not None:
            return to_dtype(args, policy.param_dtype), to_dtype(kwargs, policy.param_dtype)
        return None


class Leave(_Hook):
    """After forward, also when that raised."""

    def __init__(self, scope: Scope, *, is_root: bool) -> None:
        self._scope = scope
        self._is_root = is_root

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return _leave_uncompiled(self, module, output) if self._is_root else None
        return self.run(module, output)

    def run(self, module: nn.Module, output: Any) -> Any:
        policy = self._scope.policy
        if self._scope.leave(module) and self._is_root and policy.output_dtype is not None:
            return to_dtype(output, policy.output_dtype)
        return None


@torch._disable_dynamo
def _enter_uncompiled(hook: Enter, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return hook.run(module, args, kwargs)


@torch._disable_dynamo
def _leave_uncompiled(hook: Leave, module: nn.Module, output: Any) -> Any:
    return hook.run(module, output)


class ToFull(_Hook):
    """Before the forward of a layer that is kept full: arguments in the dtype of its own parameters."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        tensors = (*module.parameters(), *module.buffers())
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        return to_dtype(args, dtype), to_dtype(kwargs, dtype)


class ToLow(_Hook):
    """After it: what it returns, as the layers around it expect it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return to_dtype(output, self._dtype)


class HealBeforeStateDict(_Hook):
    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __call__(self, *_: Any) -> None:
        self._scope.restore_stale()


def calls_under_way(module: nn.Module) -> int:
    """How many calls of this module this thread is in."""
    number, frame = 0, sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            number += 1
    return number
