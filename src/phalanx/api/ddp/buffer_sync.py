"""Buffers: one rank's copied to all before a forward, or what a buffer hook does instead, by torch's method names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from phalanx.api.buffer_tables import BufferTables
from phalanx.comm.c10d import C10dGroup
from phalanx.comm.coalesced import Piece, broadcast_coalesced, broadcast_pieces, pieces
from phalanx.reducer.spread import parts_of


class BufferSync:
    """The part of a DDP module that keeps its module's buffers alike."""

    module: nn.Module
    reducer: Any
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    broadcast_bucket_size: int
    buffer_hook: _BufferCommHook
    modules_buffers: list[torch.Tensor]
    named_module_buffers: dict[str, torch.Tensor]
    _buffer_tables: tuple[BufferTables, set[str]] | None = None
    """The module as it was when its buffers were last looked up, and what was then ignored."""
    _buffer_pieces: list[tuple[Piece, list[torch.Tensor]]] | None = None
    _broadcasts_alone = False
    """Broadcast also where the group has one rank: to measure what it costs."""
    _join_config: Any
    _group: Callable[[], C10dGroup]
    _find_common_rank: Callable[[int, bool], int]

    @property
    def broadcast_buffers(self) -> bool:
        return bool(self.forward_sync_buffers)

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self.modules_buffers)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_location() == _BufferCommHookLocation.PRE_FORWARD

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and self._buffer_hook_location() == _BufferCommHookLocation.POST_FORWARD

    def _buffer_hook_location(self) -> _BufferCommHookLocation:
        hook = getattr(self, "buffer_hook", None)
        return _BufferCommHookLocation.PRE_FORWARD if hook is None else hook.buffer_comm_hook_location

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let `hook(state, named_buffers)` synchronise buffers; futures that it returns are awaited in backward."""
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = _BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    def _assign_modules_buffers(self) -> None:
        """Look the buffers up anew: a module may have replaced them."""
        self.named_module_buffers = {
            name: buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore
        }
        self.modules_buffers = list(self.named_module_buffers.values())

    def _sync_buffers(self) -> None:
        with torch.no_grad():
            # Under the join context rank 0 may have run out, and with it its buffers: agree on a rank that has not.
            source = self._find_common_rank(self._group().rank, True) if self._join_config.enable else 0
            self._look_at_buffers()
            with torch.autograd._unsafe_preserve_version_counter(tuple(self.modules_buffers)):
                self._sync_module_buffers(source)

    def _look_at_buffers(self) -> None:
        """Walk the module only where something of it has changed."""
        known, module, ignored = self._buffer_tables, self.module, self.parameters_to_ignore
        if known is None or known[1] != ignored or not known[0].are_current(module):
            self._assign_modules_buffers()
            self._buffer_tables = (BufferTables(module, self.modules_buffers), set(ignored))
            self._buffer_pieces = None

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        hook = getattr(self, "buffer_hook", None)
        if hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, dict(self.named_module_buffers))
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        if bufs is not None or bucket_size is not None:
            tensors = self.modules_buffers if bufs is None else bufs
            size = bucket_size or self.broadcast_bucket_size
            self._distributed_broadcast_coalesced(tensors, size, authoritative_rank)
        elif self._group().size > 1 or self._broadcasts_alone:
            if self._buffer_pieces is None:
                given = pieces(self.modules_buffers, self.broadcast_bucket_size, mixed=True)
                self._buffer_pieces = [(Piece(parts_of(members)), members) for members in given]
            parts = ((piece, parts_of(members)) for piece, members in self._buffer_pieces)
            broadcast_pieces(self._group(), parts, source=authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(self._group(), parts_of(tensors), source=authoritative_rank, piece_bytes=buffer_size)
