"""Collective calls as data: how to make one, and by a plain reference what must come out of it.

Values are small integers in every dtype, so sums and products are exact and results are compared bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


@dataclass(frozen=True)
class Case:
    name: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (3,)
    op: str = "sum"
    root: int = 0
    seed: int = 0
    strided: bool = False
    uneven: bool = False
    async_op: bool = False
    splits: tuple[int, ...] = field(default=())

    def shape_of(self, rank: int) -> tuple[int, ...]:
        return (self.shape[0] + rank, *self.shape[1:]) if self.uneven and self.shape else self.shape


def values(case: Case, shape: tuple[int, ...], *key: int) -> Tensor:
    made = torch.Generator().manual_seed(hash((case.seed, *key)) % (1 << 31))
    high = 2 if case.dtype is torch.bool or case.op == "product" else 8
    plain = torch.randint(0, high, (*shape, 2) if case.strided else shape, generator=made).to(case.dtype)
    return plain[..., 0] if case.strided else plain


def blank(case: Case, shape: tuple[int, ...]) -> Tensor:
    made = torch.zeros((*shape, 2) if case.strided else shape, dtype=case.dtype)
    return made[..., 0] if case.strided else made


def reduced(case: Case, parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        if case.op in ("sum", "avg"):
            total = total + part
        elif case.op == "product":
            total = total * part
        elif case.op == "min":
            total = torch.minimum(total, part)
        elif case.op == "max":
            total = torch.maximum(total, part)
        else:
            total = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[case.op](
                total, part
            )
    if case.op != "avg":
        return total
    return total / len(parts) if case.dtype in FLOATS else total.div(len(parts), rounding_mode="trunc")


def start(case: Case, group: Any, rank: int, size: int) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Make the call; returns (work or None, what the outputs are, what they must be)."""
    return globals()[f"_{case.name}"](case, group, rank, size)  # type: ignore[no-any-return]


def perform(case: Case, group: Any, rank: int, size: int) -> None:
    work, got, wanted = start(case, group, rank, size)
    if case.async_op:
        work.wait()
    compare(case, got, wanted)


def compare(case: Case, got: list[Tensor], wanted: list[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), (
            f"{case}: output {i} is {a.flatten()[:8]}, not {b.flatten()[:8]}"
        )


def _all_reduce(case: Case, group: Any, rank: int, size: int) -> Any:
    parts = [values(case, case.shape, r) for r in range(size)]
    t = values(case, case.shape, rank)
    work = dist.all_reduce(t, OPS[case.op], group, case.async_op)
    return work, [t], [reduced(case, parts)]


def _reduce(case: Case, group: Any, rank: int, size: int) -> Any:
    parts = [values(case, case.shape, r) for r in range(size)]
    t = values(case, case.shape, rank)
    work = dist.reduce(t, group=group, op=OPS[case.op], group_dst=case.root % size, async_op=case.async_op)
    return work, [t], [reduced(case, parts) if rank == case.root % size else parts[rank]]


def _broadcast(case: Case, group: Any, rank: int, size: int) -> Any:
    t = values(case, case.shape, rank)
    work = dist.broadcast(t, group=group, group_src=case.root % size, async_op=case.async_op)
    return work, [t], [values(case, case.shape, case.root % size)]


def _all_gather(case: Case, group: Any, rank: int, size: int) -> Any:
    outs = [blank(case, case.shape_of(r)) for r in range(size)]
    work = dist.all_gather(outs, values(case, case.shape_of(rank), rank), group, case.async_op)
    return work, outs, [values(case, case.shape_of(r), r) for r in range(size)]


def _all_gather_into_tensor(case: Case, group: Any, rank: int, size: int) -> Any:
    shape = case.shape or (1,)
    out = torch.zeros((size * shape[0], *shape[1:]), dtype=case.dtype)
    work = dist.all_gather_into_tensor(out, values(case, shape, rank), group, case.async_op)
    return work, [out], [torch.cat([values(case, shape, r) for r in range(size)])]


def _gather(case: Case, group: Any, rank: int, size: int) -> Any:
    root = case.root % size
    outs = [blank(case, case.shape_of(r)) for r in range(size)] if rank == root else None
    mine = values(case, case.shape_of(rank), rank)
    work = dist.gather(mine, outs, group=group, group_dst=root, async_op=case.async_op)
    return work, outs or [], [values(case, case.shape_of(r), r) for r in range(size)] if rank == root else []


def _scatter(case: Case, group: Any, rank: int, size: int) -> Any:
    root = case.root % size
    ins = [values(case, case.shape_of(r), r) for r in range(size)] if rank == root else None
    out = blank(case, case.shape_of(rank))
    work = dist.scatter(out, ins, group=group, group_src=root, async_op=case.async_op)
    return work, [out], [values(case, case.shape_of(rank), rank)]


def _reduce_scatter(case: Case, group: Any, rank: int, size: int) -> Any:
    ins = [values(case, case.shape_of(d), rank, d) for d in range(size)]
    out = blank(case, case.shape_of(rank))
    work = dist.reduce_scatter(out, ins, OPS[case.op], group, case.async_op)
    return work, [out], [reduced(case, [values(case, case.shape_of(rank), r, rank) for r in range(size)])]


def _reduce_scatter_tensor(case: Case, group: Any, rank: int, size: int) -> Any:
    shape = case.shape or (1,)
    whole = torch.cat([values(case, shape, rank, d) for d in range(size)])
    out = blank(case, shape)
    work = dist.reduce_scatter_tensor(out, whole, OPS[case.op], group, case.async_op)
    return work, [out], [reduced(case, [values(case, shape, r, rank) for r in range(size)])]


def _all_to_all(case: Case, group: Any, rank: int, size: int) -> Any:
    outs = [blank(case, case.shape_of(s)) for s in range(size)]
    ins = [values(case, case.shape_of(rank), rank, d) for d in range(size)]
    work = dist.all_to_all(outs, ins, group, case.async_op)
    return work, outs, [values(case, case.shape_of(s), s, rank) for s in range(size)]


def _all_to_all_single(case: Case, group: Any, rank: int, size: int) -> Any:
    """Rank s sends `(s + d + seed) % 4` rows to rank d."""

    def rows(source: int, target: int) -> tuple[int, ...]:
        return ((source + target + case.seed) % 4, *case.shape[1:])

    ins = [values(case, rows(rank, d), rank, d) for d in range(size)]
    wanted = torch.cat([values(case, rows(s, rank), s, rank) for s in range(size)])
    out = torch.zeros_like(wanted)
    sizes_out, sizes_in = [rows(s, rank)[0] for s in range(size)], [rows(rank, d)[0] for d in range(size)]
    work = dist.all_to_all_single(out, torch.cat(ins), sizes_out, sizes_in, group, case.async_op)
    return work, [out], [wanted]


def _all_reduce_coalesced(case: Case, group: Any, rank: int, size: int) -> Any:
    shapes = [case.shape, (2, 3), (0,), (1,)]
    ts = [values(case, s, rank, k) for k, s in enumerate(shapes)]
    wanted = [reduced(case, [values(case, s, r, k) for r in range(size)]) for k, s in enumerate(shapes)]
    work = dist.all_reduce_coalesced(ts, OPS[case.op], group, case.async_op)
    return work, ts, wanted


def _ring(case: Case, group: Any, rank: int, size: int) -> Any:
    """Send to the next rank, receive from the one before, by batch_isend_irecv."""
    shape = case.shape or (1,)
    out = blank(case, shape)
    ops = [
        dist.P2POp(dist.isend, values(case, shape, rank), group=group, group_peer=(rank + 1) % size, tag=case.seed % 5),
        dist.P2POp(dist.irecv, out, group=group, group_peer=(rank - 1) % size, tag=case.seed % 5),
    ]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
    return works[0], [out], [values(case, shape, (rank - 1) % size)]


def _arena_all_reduce(case: Case, group: Any, rank: int, size: int) -> Any:
    flat = values(case, case.shape, rank).reshape(-1)
    t = group.allocate(flat.numel() + 3, case.dtype)
    view = t[3:]
    view.copy_(flat)
    dist.all_reduce(view, OPS[case.op], group)
    out = view.clone()
    group.release(t)
    wanted = reduced(case, [values(case, case.shape, r) for r in range(size)]).reshape(-1)
    done: Any = torch.distributed.Work() if not case.async_op else dist.barrier(group, async_op=True)
    return done, [out], [wanted]


REDUCING = [
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_reduce_coalesced",
    "arena_all_reduce",
]
MOVING = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "ring",
]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def ops_for(dtype: torch.dtype) -> list[str]:
    if dtype in FLOATS:
        return ["sum", "product", "min", "max", "avg"]
    if dtype is torch.bool:
        return ["min", "max", "band", "bor", "bxor"]
    return ["sum", "product", "min", "max", "avg", "band", "bor", "bxor"]
