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
from phalanx.comm.group import Group
from phalanx.reducer.unused import Flag, Report

BufferPolicy = Literal["rank0", "mean", "none"]
_PIECE_BYTES = 25 * 1024 * 1024


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

    def flags(self) -> Flag:
        module = self._module()
        return Flag.TRAINING if module is not None and module.training else Flag(0)

    def after_step(self, report: Report) -> None:
        if self._policy == "none" or self._group.size == 1 or not report.ranks_with(Flag.TRAINING):
            return
        module = self._module()
        if module is None:
            return
        places: dict[int, tuple[torch.Tensor, list[tuple[nn.Module, str]]]] = {}
        for prefix, submodule in module.named_modules():
            for key, buffer in submodule._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is not None and name not in self._ignored:
                    places.setdefault(id(buffer), (buffer, []))[1].append((submodule, key))
        with torch.no_grad():
            for piece in pieces([buffer for buffer, _ in places.values()], _PIECE_BYTES):
                for old, new in zip(piece, self._synchronised(piece), strict=True):
                    for submodule, key in places[id(old)][1]:
                        submodule._buffers[key] = new

    def _synchronised(self, piece: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in piece])
        averaged = self._policy == "mean" and (flat.is_floating_point() or flat.is_complex())
        if averaged:
            self._group.all_reduce(flat).wait()
            flat.div_(self._group.size)
        else:
            self._group.broadcast(flat, 0).wait()
            if self._group.rank == 0:
                return piece
        parts = flat.split([buffer.numel() for buffer in piece])
        # Each in memory of its own, laid out as before: one that a user keeps must not keep the others.
        return [
            torch.empty_like(buffer).copy_(part.view(buffer.shape))
            for buffer, part in zip(piece, parts, strict=True)
        ]
