"""Where a module keeps its buffers, remembered: walking a large module takes longer than comparing it with what it was."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

ABSENT = object()
_modules_of: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_modules")
_buffers_of: Callable[[nn.Module], dict[str, Any]] = operator.attrgetter("_buffers")
_layout_of: Callable[[torch.Tensor], Any] = operator.attrgetter("dtype", "device", "shape")
_data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
_numel: Callable[[Any], int] = torch.Tensor.numel
_WALKS = {name: getattr(nn.Module, name) for name in ("named_buffers", "named_modules", "_named_members")}


class Layouts:
    """What may change of tensors that stay the same objects: their dtype, device and shape.

    Looked at only where their memory or their size has changed, as it does with any of these: objects for all three are
    made anew each time that one asks.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._layouts = list(map(_layout_of, tensors))
        self.remember(tensors)

    def remember(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are laid out alike, wherever they lie."""
        self._places = list(map(_data_ptr, tensors))
        self._sizes = list(map(_numel, tensors))
        self._tell = all(map(operator.or_, map(bool, self._places), map(operator.not_, self._sizes)))

    def are_current(self, tensors: Sequence[torch.Tensor]) -> bool:
        """`tensors` are those that were remembered, in the same order."""
        where = self._tell and list(map(_data_ptr, tensors)) == self._places
        if where and list(map(_numel, tensors)) == self._sizes:
            return True
        if list(map(_layout_of, tensors)) != self._layouts:
            return False
        self.remember(tensors)
        return True


class BufferTables:
    """A module's parts and buffers as they were found, to tell whether any was added, replaced, resized or cast since.

    Of `buffers`, which are some or all of them, the layout is looked at, too. A module that finds its buffers by itself, or
    has tables of another kind (a ScriptModule), cannot be compared: it counts as changed each time.
    """

    def __init__(self, module: nn.Module, buffers: Sequence[torch.Tensor]) -> None:
        self._parts = list(module.modules())
        self._modules, self._buffers = list(map(_modules_of, self._parts)), list(map(_buffers_of, self._parts))
        self._all = [*self._modules, *self._buffers]
        self._sizes = list(map(len, self._all))
        entries = [(table, key, held) for table in self._all for key, held in table.items()]
        self._tables = [table for table, _, _ in entries]
        self._keys = [key for _, key, _ in entries]
        self._held = [held for _, _, held in entries]  # parts and buffers; a buffer may be None
        self._tensors = list(buffers)
        self._layouts = Layouts(self._tensors)
        finds_alike = all(getattr(type(part), name) is own for part in self._parts for name, own in _WALKS.items())
        self._can_compare = finds_alike and all(isinstance(table, dict) for table in self._all)

    def are_current(self, module: nn.Module) -> bool:
        """Whether this module is still what was found. In C, as it runs for every buffer in every forward."""
        return (
            self._can_compare
            and module is self._parts[0]
            and all(map(operator.is_, map(_modules_of, self._parts), self._modules))
            and all(map(operator.is_, map(_buffers_of, self._parts), self._buffers))
            and all(map(operator.is_, map(dict.get, self._tables, self._keys, repeat(ABSENT)), self._held))
            and list(map(len, self._all)) == self._sizes
            and self._layouts.are_current(self._tensors)
        )
