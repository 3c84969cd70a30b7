"""The arithmetic of reductions, by torch's kernels, always in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp


class UnsupportedReductionError(ValueError, RuntimeError):
    """This operation does not exist for this dtype. A RuntimeError too, as with torch's own backends."""


def _add(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


def _mul(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mul(a, b, out=out)


def _minimum(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.minimum(a, b, out=out)


def _maximum(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.maximum(a, b, out=out)


def _and(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bitwise_and(a, b, out=out)


def _or(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bitwise_or(a, b, out=out)


def _xor(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bitwise_xor(a, b, out=out)


Combine = Callable[[Tensor, Tensor, Tensor], None]

COMBINE: dict[str, Combine] = {
    "sum": _add,
    "avg": _add,
    "product": _mul,
    "min": _minimum,
    "max": _maximum,
    "band": _and,
    "bor": _or,
    "bxor": _xor,
}

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def operation(op: object) -> str:
    """Our name of a torch ReduceOp."""
    inner = getattr(op, "op", op)
    name = _NAMES.get(inner)  # type: ignore[call-overload]
    if name is None:
        raise UnsupportedReductionError(f"the phalanx group cannot reduce with {op}; it knows {', '.join(COMBINE)}")
    return str(name)


def check(name: str, dtype: torch.dtype) -> None:
    """Raises where the operation does not exist for the dtype; before anything is sent."""
    if dtype in _FLOATS:
        fine = name in ("sum", "avg", "product", "min", "max")
    elif dtype in _COMPLEX:
        fine = name in ("sum", "avg", "product")
    elif dtype in _INTEGERS:
        fine = name != "avg" or dtype is not torch.bool
    else:
        raise UnsupportedReductionError(f"Invalid scalar type: the phalanx group cannot reduce {dtype}")
    if not fine:
        raise UnsupportedReductionError(f"Cannot use ReduceOp.{name.upper()} with {dtype} tensors")


def fold(name: str, parts: Sequence[Tensor], out: Tensor, own: int) -> None:
    """out = parts[0] ∘ parts[1] ∘ …, in this order. `out` may be `parts[own]`, and no other."""
    combine = COMBINE[name]
    if len(parts) == 1:
        if out is not parts[0]:
            out.copy_(parts[0])
    elif own < 2 or out is not parts[own]:
        combine(parts[0], parts[1], out)
        for part in parts[2:]:
            combine(out, part, out)
    else:  # writing the first sum to `out` would lose our own part before its turn
        total = torch.empty_like(parts[0])
        combine(parts[0], parts[1], total)
        for part in parts[2:]:
            combine(total, part, total)
        out.copy_(divided(total, len(parts)) if name == "avg" else total)
        return
    if name == "avg" and len(parts) > 1:
        divided(out, len(parts))


def divided(total: Tensor, count: int) -> Tensor:
    """A sum made an average, in place. Integers are rounded towards zero, as NCCL does: Lightning averages counts so."""
    return total.div_(count, rounding_mode="trunc" if total.dtype in _INTEGERS else None)
