"""Tensors nested in a forward's arguments and results, each replaced by what a function makes of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Tensors in tuples, lists, dicts, named tuples, data classes and packed sequences, changed; the rest as it is.

    Containers are copied, and keep their type; a value in which nothing changes is returned itself.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        data = change(value.data)
        return value if data is value.data else value._replace(data=data)
    if isinstance(value, tuple):
        parts = [map_tensors(part, change) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        parts = [map_tensors(part, change) for part in value]
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
    if isinstance(value, dict):
        changed = {key: new for key, old in value.items() if (new := map_tensors(old, change)) is not old}
        if not changed:
            return value
        made = copy.copy(value)  # not by its type's constructor, which need not take items (defaultdict's does not)
        for key, part in changed.items():
            made[key] = part
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {key: new for key, old in named.items() if (new := map_tensors(old, change)) is not old}
        if not changed:
            return value
        instance = copy.copy(value)
        for key, part in changed.items():
            object.__setattr__(instance, key, part)  # frozen ones too: the copy is not shared yet
        return instance
    return value


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors cast, in a way that autograd follows; others are left alone."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
