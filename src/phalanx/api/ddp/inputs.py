"""Moving a batch to the module's device, whatever it is nested in."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists, dicts and named tuples, moved; anything of another type is passed on as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, PackedSequence):
        return value.to(device, non_blocking=True)  # type: ignore[arg-type]  # torch's stub has the dtype form only
    if isinstance(value, tuple):
        moved = [to_device(part, device) for part in value]
        return type(value)(*moved) if hasattr(value, "_fields") else tuple(moved)
    if isinstance(value, list):
        return [to_device(part, device) for part in value]
    if isinstance(value, dict):
        made = copy.copy(value)  # not by its type's constructor, which need not take items (defaultdict's does not)
        for key, part in value.items():
            made[key] = to_device(part, device)
        return made
    return value
