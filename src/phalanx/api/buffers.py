"""Keeping buffers (running statistics, counters) alike on all ranks: once per step, when its gradients are averaged.

Buffers are replaced, not written into: a graph that another forward left behind may still need the old values. And it
happens in the step, where all ranks take part anyway, not in forward: a rank that evaluates, or that does not call the
module in some step, keeps nobody waiting.
"""

from __future__ import annotations

import operator
import weakref
from itertools import repeat
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from phalanx.api.buffer_tables import ABSENT, Layouts
from phalanx.comm.coalesced import Piece, pieces
from phalanx.comm.group import Group, Work
from phalanx.reducer.spread import parts_of
from phalanx.reducer.unused import Flag, Report

BufferPolicy = Literal["rank0", "mean", "none"]
_Table = dict[str, torch.Tensor | None]
_PIECE_BYTES = 25 * 1024 * 1024
_registrations = [0]  # of buffers, in all modules of this process


def _note_registration(*_: object) -> None:
    """Called by torch whenever a module gets a buffer."""
    _registrations[0] += 1


register_module_buffer_registration_hook(_note_registration)


def check_policy(policy: str) -> None:
    if policy not in get_args(BufferPolicy):
        raise ValueError(f"buffers must be one of {', '.join(get_args(BufferPolicy))}; got {policy!r}")


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
        self._all_tables = [table for _, table in self._tables]
        self._look_up()

    def _look_up(self) -> None:
        """Each buffer once, by identity, with every place where it is registered; and the memory to send them in."""
        self._registrations = _registrations[0]
        found: dict[int, tuple[torch.Tensor, list[tuple[_Table, str]]]] = {}
        empty: list[tuple[_Table, str]] = []
        for prefix, table in self._tables:
            for key, buffer in table.items():
                if buffer is None:
                    empty.append((table, key))
                elif f"{prefix}{key}" not in self._ignored:
                    found.setdefault(id(buffer), (buffer, []))[1].append((table, key))
        self._sizes = list(map(len, self._all_tables))
        self._pieces = [
            (Piece(parts_of(members)), members, [found[id(member)][1] for member in members])
            for members in pieces([buffer for buffer, _ in found.values()], _PIECE_BYTES, mixed=self._policy == "rank0")
        ]
        self._layouts = [Layouts(members) for _, members, _ in self._pieces]
        held = [(members, place, at) for _, members, places in self._pieces for place, at in enumerate(places)]
        self._empty_in, self._empty_as = [table for table, _ in empty], [key for _, key in empty]
        self._held = [(members, place) for members, place, at in held for _ in at]
        self._held_in = [table for _, _, at in held for table, _ in at]
        self._held_as = [key for _, _, at in held for _, key in at]

    def _is_up_to_date(self) -> bool:
        """Whether the module holds the buffers that were looked up, or put there since, and they are as they were."""
        if not self._held and not self._empty_in and self._registrations == _registrations[0]:
            return (
                True  # it has none: looking through all of its parts would cost more than all else that is to do here
            )
        filled = map(operator.is_not, map(dict.get, self._empty_in, self._empty_as, repeat(ABSENT)), repeat(None))
        if list(map(len, self._all_tables)) != self._sizes or any(filled):
            return False
        found = map(dict.get, self._held_in, self._held_as)
        known = (members[place] for members, place in self._held)
        return all(map(operator.is_, found, known)) and all(
            layouts.are_current(members) for layouts, (_, members, _) in zip(self._layouts, self._pieces, strict=True)
        )

    def flags(self) -> int:
        module = self._module()
        return Flag.NONE if module is not None and module.training else Flag.EVALUATING

    def after_step(self, report: Report) -> None:
        alone = self._group.size == 1 and not self.alone_too
        if self._policy == "none" or alone or len(report.ranks_with(Flag.EVALUATING)) == self._group.size:
            return
        if not self._is_up_to_date():
            self._look_up()
        if not self._pieces:
            return
        # A rank that has run out of data has buffers of its last batch: those that are at work count.
        out = report.ranks_with(Flag.OUT)
        self._at_work = [rank for rank in range(self._group.size) if rank not in out] or [0]
        with torch.no_grad():
            # All are started before the first is waited for: each is small, and the wire's latency is paid once.
            started = [self._start(piece, members) for piece, members, _ in self._pieces]
            for (work, flat, views), (piece, members, places), layouts in zip(
                started, self._pieces, self._layouts, strict=True
            ):
                work.wait()
                if self._replace(piece, flat, views, members, places):
                    layouts.remember(members)

    def _averages(self, flat: torch.Tensor) -> bool:
        return self._policy == "mean" and (flat.is_floating_point() or flat.is_complex())

    def _start(self, piece: Piece, members: list[torch.Tensor]) -> tuple[Work, torch.Tensor, list[torch.Tensor]]:
        flat, views = piece.room()
        averages = self._averages(flat)
        if averages or self._group.rank == self._at_work[0]:
            piece.copy(views, parts_of(members))
        if not averages:
            return self._group.broadcast(flat, self._at_work[0]), flat, views
        if self._group.rank not in self._at_work:
            flat.zero_()
        return self._group.all_reduce(flat), flat, views

    def _replace(
        self,
        piece: Piece,
        flat: torch.Tensor,
        views: list[torch.Tensor],
        members: list[torch.Tensor],
        places: list[list[tuple[_Table, str]]],
    ) -> bool:
        if self._averages(flat):
            flat.div_(len(self._at_work))
        elif self._group.rank == self._at_work[0]:
            return False
        # Each in memory of its own, laid out as before: one that a user keeps must not keep the others.
        members[:] = [torch.empty_like(member) for member in members]
        piece.copy(parts_of(members), views)
        for member, held_at in zip(members, places, strict=True):
            for table, key in held_at:
                table[key] = member
        return True
