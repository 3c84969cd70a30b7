"""Running a module in another precision than it is kept in: casts stand in its tables for as long as it runs.

The outermost call of a module in the tree puts a cast of every parameter in the parameter's place, and takes it out
again when the call is over, also by an exception. The casts are part of the graph: gradients come back to the real
parameters, in the parameters' own dtype. All of the tree below that call is cast at once, not each module in its own
call, so that code which reaches into a submodule finds there what that submodule would compute with. Each module is
hooked, not the root alone: checkpointing calls a part of the tree by itself, in backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from phalanx.api.lowering_hooks import Enter, HealBeforeStateDict, Leave, ToFull, ToLow, calls_under_way
from phalanx.api.precision import Precision
from phalanx.reducer.streams import current_stream

_Table = dict[str, Any]


class _Swap(NamedTuple):
    """A cast in a table, in the place of the real thing."""

    table: _Table
    key: str
    real: torch.Tensor
    cast: torch.Tensor
    is_buffer: bool


class Lowering:
    """A policy at work on one module tree, from `install` to `remove`. One thread runs the tree at a time."""

    def __init__(self, root: nn.Module, policy: Precision, *, without: Iterable[str] = ()) -> None:
        """`without` names parameters and buffers that are not cast."""
        self.policy = policy
        self._root = weakref.ref(root)
        self._kept_types = tuple(layer for layer in policy.keep_full if isinstance(layer, type))
        self._kept_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._kept_keys: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self._removers: list[Callable[[], None]] = []
        self._owner: weakref.ref[nn.Module] | None = None  # whose call has put the casts in place
        self._depth = 0  # how often it has called itself since
        self._thread = 0
        self._swaps: list[_Swap] = []
        self._flat_weights: list[tuple[nn.RNNBase, dict[str, Any]]] = []
        self._made_in: tuple[torch.device, int] | None = None  # on a GPU: where casts were made, and in which stream
        self._read_names(root, {*without, *(layer for layer in policy.keep_full if isinstance(layer, str))})

    def _read_names(self, root: nn.Module, names: set[str]) -> None:
        for prefix, module in root.named_modules(remove_duplicate=False):
            if prefix in names:
                self._kept_modules.add(module)
            for key in (*module._parameters, *module._buffers):
                if (f"{prefix}.{key}" if prefix else key) in names:
                    self._kept_keys.setdefault(module, set()).add(key)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def install(self) -> None:
        root, policy = self._root(), self.policy
        assert root is not None
        if policy.param_dtype is None and policy.buffer_dtype is None and policy.output_dtype is None:
            return
        seen: set[nn.Module] = set()
        for module in self._lowered(root, seen):
            if module is root or _holds_tensors(module):
                self._hook(module, Enter(self, is_root=module is root), Leave(self, is_root=module is root))
        for module in seen:
            if self._keeps(module) and policy.param_dtype is not None:
                self._hook(module, ToFull(), ToLow(policy.param_dtype))
        self._removers.append(root.register_state_dict_pre_hook(HealBeforeStateDict(self)).remove)

    def _hook(self, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._removers.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._removers.append(module.register_forward_hook(after, always_call=True).remove)

    def remove(self) -> None:
        self.restore()
        for remove in self._removers:
            remove()
        self._removers.clear()

    # -- which modules and parameters ------------------------------------------------------------------------------

    def _keeps(self, module: nn.Module) -> bool:
        return isinstance(module, self._kept_types) or module in self._kept_modules

    def _lowered(self, top: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
        """The modules of a tree that are not kept full, each once; `seen` gets those too at which the walk ends.

        Looked up in every call: a submodule may have been replaced.
        """
        stack = [top]
        while stack:
            module = stack.pop()
            if module in seen:
                continue
            seen.add(module)
            if not self._keeps(module):
                yield module
                stack.extend(child for child in module._modules.values() if child is not None)

    def described(self, name: str, tensor: torch.Tensor) -> str:
        """What happens to a parameter or buffer, for ranks to compare; empty where nothing does."""
        if not tensor.is_floating_point():
            return ""
        policy = self.policy
        is_parameter = isinstance(tensor, nn.Parameter)
        computed = policy.param_dtype if is_parameter else policy.buffer_dtype
        said = f", computed in {computed}" if computed is not None and self._lowers(name) else ""
        return f"{said}, reduced in {policy.reduce_dtype}" if is_parameter and policy.reduce_dtype else said

    def _lowers(self, name: str) -> bool:
        module = self._root()
        *path, key = name.split(".")
        for part in path:
            if module is None or self._keeps(module):
                return False
            module = module._modules[part]
        return module is not None and not self._keeps(module) and key not in self._kept_keys.get(module, ())

    # -- a call ----------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether casts are in place just now."""
        return self._owner is not None

    def enter(self, module: nn.Module) -> bool:
        """A module of the tree is called; returns whether that is the outermost call."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and self._is_stale(owner, module):
            self.restore()
            owner = None
        if owner is not None:
            self._depth += owner is module
            if self._made_in is not None and current_stream(self._made_in[0]) != self._made_in[1]:
                _use_here(module)
            return False
        self._owner, self._depth, self._thread = weakref.ref(module), 1, threading.get_ident()
        try:
            self._lower(module)
        except BaseException:
            self.restore()
            raise
        return True

    def leave(self, module: nn.Module) -> bool:
        """A call is over, in whichever way; returns whether that was the outermost."""
        if self._owner is None or self._owner() is not module:
            return False
        self._depth -= 1
        if self._depth:
            return False
        self.restore()
        return True

    def _is_stale(self, owner: nn.Module, entered: nn.Module) -> bool:
        """Whether the owner's call has ended unnoticed: an interrupt goes past the hooks.

        Looked at where its module or the root is entered, which is rare inside of a call: a walk over frames takes time.
        """
        if self._thread != threading.get_ident() or (entered is not owner and entered is not self._root()):
            return False
        return calls_under_way(owner) <= (self._depth if entered is owner else 0)

    def restore_stale(self) -> None:
        """Put everything back that an interrupt has left behind in this thread: hooks are not called for those."""
        owner = None if self._owner is None else self._owner()
        if owner is not None and self._thread == threading.get_ident() and not calls_under_way(owner):
            self.restore()

    def restore(self) -> None:
        """Put everything back. Does nothing where nothing is out of place."""
        swaps, self._swaps = self._swaps, []
        flat_weights, self._flat_weights = self._flat_weights, []
        self._owner = None
        for swap in swaps:
            now = swap.table.get(swap.key)
            if now is swap.cast:
                swap.table[swap.key] = swap.real
                if swap.is_buffer:
                    _take_over_changes(swap.real, swap.cast)
            elif swap.is_buffer and isinstance(now, torch.Tensor) and now.dtype == swap.cast.dtype:
                swap.table[swap.key] = now.to(swap.real.dtype)  # forward assigned a new one
        for module, attributes in flat_weights:
            module.__dict__.update(attributes)

    def _lower(self, top: nn.Module) -> None:
        param_dtype, buffer_dtype = self.policy.param_dtype, self.policy.buffer_dtype
        casts: dict[int, torch.Tensor] = {}  # one for all places of a tied parameter
        # Also under no_grad: a part of forward may enable gradients again, and must find its way to the parameters.
        with torch.inference_mode(False), torch.enable_grad():
            for module in self._lowered(top, set()):
                kept = self._kept_keys.get(module, ())
                if isinstance(module, nn.RNNBase):  # keeps its weights in a list, too
                    held = {key: value for key, value in vars(module).items() if key.startswith("_flat_weight")}
                    self._flat_weights.append((module, held))
                if param_dtype is not None:
                    self._swap(module._parameters, kept, param_dtype, casts, is_buffer=False)
                if buffer_dtype is not None:
                    self._swap(module._buffers, kept, buffer_dtype, casts, is_buffer=True)
        device = next((cast.device for cast in casts.values() if cast.is_cuda), None)
        self._made_in = None if device is None else (device, current_stream(device))

    def _swap(
        self,
        table: _Table,
        kept: Iterable[str],
        dtype: torch.dtype,
        casts: dict[int, torch.Tensor],
        *,
        is_buffer: bool,
    ) -> None:
        for key, tensor in table.items():
            if tensor is None or tensor.dtype == dtype or not tensor.is_floating_point() or key in kept:
                continue
            cast = casts.get(id(tensor))
            if cast is None:
                cast = casts[id(tensor)] = tensor.to(dtype)
            self._swaps.append(_Swap(table, key, tensor, cast, is_buffer))
            table[key] = cast


def _use_here(module: nn.Module) -> None:
    """Some layer runs in a stream of its own. Autograd lets go of its casts while that stream may still read them."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _take_over_changes(real: torch.Tensor, cast: torch.Tensor) -> None:
    """What forward wrote into a buffer (running statistics). Elements that it left alone are not rounded.

    By value: kernels that update statistics do not all count as writes. And without asking the device whether any did.
    """
    with torch.no_grad():
        real.copy_(torch.where(cast == real.to(cast.dtype), real, cast.to(real.dtype)))


def _holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None
