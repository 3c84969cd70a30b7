"""Tensors as callers pass them, made ready to travel: checked before anything is sent, flat and contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor


class ArgumentError(ValueError, RuntimeError):
    """A call that cannot be made. A RuntimeError too, as torch's own backends raise."""


def one(tensors: Sequence[Tensor], name: str) -> Tensor:
    if len(tensors) != 1:
        raise ArgumentError(f"{name}: expected one tensor (one device per rank), got {len(tensors)}")
    return dense(tensors[0], name)


def dense(tensor: Tensor, name: str) -> Tensor:
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.device.type != "cpu":
        raise ArgumentError(f"{name}: expected a CPU tensor like the call's others, got one on {tensor.device}")
    return tensor


def same_dtype(tensors: Iterable[Tensor], name: str) -> None:
    found = {tensor.dtype for tensor in tensors}
    if len(found) > 1:
        raise ArgumentError(f"{name}: expected tensors of one dtype, got {sorted(map(str, found))}")


def count(given: int, expected: int, name: str, what: str) -> None:
    if given != expected:
        raise ArgumentError(f"{name}: expected {expected} {what}, one for each rank, got {given}")


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a flat view. A tensor of one element may be contiguous and have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def readable(tensor: Tensor) -> Tensor:
    """Flat and contiguous, for reading only."""
    return flat(tensor.detach().contiguous())


def as_bytes(flat: Tensor) -> Tensor:
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


class Landing:
    """A flat contiguous place for a result: the tensor itself, or a copy that is carried home at the end."""

    __slots__ = ("_home", "flat")

    def __init__(self, tensor: Tensor, *, filled: bool) -> None:
        self._home: Tensor | None = None
        if tensor.dim() == 1 and tensor.stride(0) == 1 and not tensor.requires_grad:
            self.flat = tensor
            return
        tensor = tensor.detach()
        if tensor.is_contiguous():
            self.flat = flat(tensor)
        else:
            self._home = tensor
            self.flat = flat(
                tensor.contiguous() if filled else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            )

    def land(self) -> None:
        if self._home is not None:
            self._home.copy_(self.flat.view(self._home.shape))


def splits(given: Sequence[int] | None, size: int, rows: int, name: str) -> list[int]:
    """How many rows go to each rank: as asked, or evenly."""
    if not given:
        if rows % size:
            raise ArgumentError(f"{name}: {rows} rows cannot be split evenly among {size} ranks; pass split sizes")
        return [rows // size] * size
    count(len(given), size, name, "split sizes")
    if sum(given) != rows or min(given) < 0:
        raise ArgumentError(f"{name}: split sizes {list(given)} do not add up to the {rows} rows of the tensor")
    return list(given)


def cut(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """A contiguous tensor cut along its first dimension, as flat views."""
    width = tensor.numel() // tensor.shape[0] if tensor.dim() and tensor.shape[0] else 0
    return list(flat(tensor).split([n * width for n in rows]))


def seconds(timeout: timedelta | None, default_s: float) -> float:
    """c10d passes an unset timeout as a negative one."""
    if timeout is None:
        return default_s
    value = timeout.total_seconds()
    return value if value > 0 else default_s


def is_async(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", True))
