"""Keeping buffers (running statistics, counters) alike on all ranks: once per step, when its gradients are averaged.

Buffers are replaced, not written into: a graph that another forward left behind may still need the old values. And it
happens in the step, where all ranks take part anyway, not in forward: a rank that evaluates, or that does not call the
module in some step, keeps nobody waiting.
"""

from __future__ import annotations

import weakref
from typing import Literal, get_args

import torch
from torch import nn

from phalanx.comm.coalesced import pieces
from phalanx.comm.group import Group, Work
from phalanx.reducer.spread import parts_of
from phalanx.reducer.unused import Flag, Report

BufferPolicy = Literal["rank0", "mean", "none"]
_Table = dict[str, torch.Tensor | None]
_PIECE_BYTES = 25 * 1024 * 1024


def check_policy(policy: str) -> None:
    if policy not in get_args(BufferPolicy):
        raise ValueError(f"buffers must be one of {', '.join(get_args(BufferPolicy))}; got {policy!r}")


class _Piece:
    """Buffers of one dtype and device that travel together, and the flat memory in which they do."""

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self.flat = torch.empty(
            sum(buffer.numel() for buffer in buffers), dtype=buffers[0].dtype, device=buffers[0].device
        )
        parts = self.flat.split([buffer.numel() for buffer in buffers])
        self.views = [part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True)]


class BufferSync:
    """Synchronises a module's buffers after each step in which some rank was in training mode."""

    def __init__(self, module: nn.Module, group: Group, policy: BufferPolicy, ignored: frozenset[str]) -> None:
        self._module = weakref.ref(module)
        self._group = group
        self._policy = policy
        self._ignored = ignored
        self._at_work = list(range(group.size))
        self.alone_too = False
        """Run the collectives also where the group has one rank: to measure what they cost."""
        self.remember(module)

    def remember(self, module: nn.Module) -> None:
        """Where buffers are registered: looked up once, since walking a large module takes longer than its buffers."""
        self._tables = [
            (f"{prefix}." if prefix else "", submodule._buffers) for prefix, submodule in module.named_modules()
        ]
        self._look_up()

    def _look_up(self) -> None:
        """Each buffer once, by identity, with every place where it is registered; and the memory to send them in."""
        found: dict[int, tuple[torch.Tensor, list[tuple[_Table, str]]]] = {}
        for prefix, table in self._tables:
            for key, buffer in table.items():
                if buffer is not None and f"{prefix}{key}" not in self._ignored:
                    found.setdefault(id(buffer), (buffer, []))[1].append((table, key))
        self._sizes = [len(table) for _, table in self._tables]
        self._pieces = [
            (_Piece(parts_of(members)), members, [found[id(member)][1] for member in members])
            for members in pieces([buffer for buffer, _ in found.values()], _PIECE_BYTES)
        ]
        self._layouts = [[_layout(member) for member in members] for _, members, _ in self._pieces]

    def _is_up_to_date(self) -> bool:
        """Whether the module holds the buffers that were looked up, or put there since."""
        return [len(table) for _, table in self._tables] == self._sizes and all(
            table.get(key) is member
            for _, members, places in self._pieces
            for member, held_at in zip(members, places, strict=True)
            for table, key in held_at
        )

    def flags(self) -> Flag:
        module = self._module()
        return Flag.TRAINING if module is not None and module.training else Flag(0)

    def after_step(self, report: Report) -> None:
        alone = self._group.size == 1 and not self.alone_too
        if self._policy == "none" or alone or not report.ranks_with(Flag.TRAINING):
            return
        if not self._is_up_to_date() or self._layouts != [
            [_layout(member) for member in members] for _, members, _ in self._pieces
        ]:
            self._look_up()
        # A rank that has run out of data has buffers of its last batch: those that are at work count.
        out = report.ranks_with(Flag.OUT)
        self._at_work = [rank for rank in range(self._group.size) if rank not in out] or [0]
        with torch.no_grad():
            # All are started before the first is waited for: each is small, and the wire's latency is paid once.
            works = [self._start(piece, members) for piece, members, _ in self._pieces]
            for work, (piece, members, places) in zip(works, self._pieces, strict=True):
                work.wait()
                self._replace(piece, members, places)

    def _averages(self, flat: torch.Tensor) -> bool:
        return self._policy == "mean" and (flat.is_floating_point() or flat.is_complex())

    def _start(self, piece: _Piece, members: list[torch.Tensor]) -> Work:
        flat = piece.flat
        torch._foreach_copy_(piece.views, parts_of(members))
        if not self._averages(flat):
            return self._group.broadcast(flat, self._at_work[0])
        if self._group.rank not in self._at_work:
            flat.zero_()
        return self._group.all_reduce(flat)

    def _replace(self, piece: _Piece, members: list[torch.Tensor], places: list[list[tuple[_Table, str]]]) -> None:
        if self._averages(piece.flat):
            piece.flat.div_(len(self._at_work))
        elif self._group.rank == self._at_work[0]:
            return
        # Each in memory of its own, laid out as before: one that a user keeps must not keep the others.
        members[:] = [torch.empty_like(member) for member in members]
        torch._foreach_copy_(parts_of(members), piece.views)
        for member, held_at in zip(members, places, strict=True):
            for table, key in held_at:
                table[key] = member


def _layout(buffer: torch.Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return buffer.dtype, buffer.device, buffer.shape
