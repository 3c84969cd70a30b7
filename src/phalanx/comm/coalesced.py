"""Broadcasting many tensors as few: one flat message per device, in pieces of bounded size.

Tensors of several dtypes go into one piece as bytes: each message costs its latency, and on a GPU the host's time to start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from phalanx.comm.group import Group, Work

PIECE_BYTES = 64 * 1024 * 1024
KEPT_BYTES = 16 * 1024 * 1024  # memory of a piece that is sent again and again stays, up to this size
ALIGNED_BYTES = 16  # where a dtype begins


class Piece:
    """Tensors of one device that travel together: the flat memory in which they do, and a view of it for each."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(place)
        self._by_dtype = list(by_dtype.values())
        """Which are copied as one: torch's fused kernels take one dtype at a time."""
        self.device = tensors[0].device
        self.dtype = tensors[0].dtype if len(by_dtype) == 1 else torch.uint8
        """What the flat memory is sent as."""
        self._shapes = [(tensor.dtype, tensor.shape, tensor.numel()) for tensor in tensors]
        self._num_bytes = 0
        self._begins: list[int] = []
        for dtype, places in by_dtype.items():
            self._num_bytes = -(-self._num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
            self._begins.append(self._num_bytes)
            self._num_bytes += sum(self._shapes[place][2] for place in places) * dtype.itemsize
        self._kept = self._make() if self._num_bytes <= KEPT_BYTES else None

    def _make(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.inference_mode(False):  # what is kept is used outside of it as well
            flat = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.device)
        views: list[Any] = [None] * len(self._shapes)
        for begin, places in zip(self._begins, self._by_dtype, strict=True):
            shapes = [self._shapes[place] for place in places]
            dtype, sizes = shapes[0][0], [numel for _, _, numel in shapes]
            parts = flat[begin : begin + sum(sizes) * dtype.itemsize].view(dtype).split(sizes)
            for place, part, (_, shape, _) in zip(places, parts, shapes, strict=True):
                views[place] = part.view(shape)
        return flat.view(self.dtype), views

    def room(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The memory and its views, with nothing in them."""
        return self._kept or self._make()

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source into its target: the tensors into their views, or back."""
        if len(self._by_dtype) == 1:
            copy_together(targets, sources)
            return
        for places in self._by_dtype:
            copy_together([targets[place] for place in places], [sources[place] for place in places])


def copy_together(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, all of one dtype, as one where torch's fused kernels can."""
    try:
        torch._foreach_copy_(list(targets), list(sources))
    except RuntimeError:  # some cannot: conjugate or negative views, dtypes that they do not know
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def broadcast_coalesced(
    group: Group, tensors: Sequence[torch.Tensor], *, source: int, piece_bytes: int = PIECE_BYTES
) -> None:
    """Give every rank the source's values, in place. All ranks pass alike tensors in the same order."""
    if group.size > 1:
        given = ((Piece(members), members) for members in pieces(tensors, piece_bytes, mixed=True))
        broadcast_pieces(group, given, source=source)


def broadcast_pieces(group: Group, given: Iterable[tuple[Piece, Sequence[torch.Tensor]]], *, source: int) -> None:
    """Likewise, of tensors that were made into pieces before."""
    is_source = group.rank == source
    with torch.no_grad():
        started: deque[_Started] = deque()
        for piece, members in given:
            flat, views = piece.room()
            if is_source:
                piece.copy(views, members)
            started.append((group.broadcast(flat, source), piece, views, members))
            if len(started) > 1:  # two at a time: one is on the wire while the other is packed or unpacked
                _finish(started.popleft(), is_source=is_source)
        while started:
            _finish(started.popleft(), is_source=is_source)


_Started = tuple[Work, Piece, list[torch.Tensor], Sequence[torch.Tensor]]


def _finish(started: _Started, *, is_source: bool) -> None:
    work, piece, views, members = started
    work.wait()
    if not is_source:
        piece.copy(members, views)


def pieces(tensors: Iterable[torch.Tensor], piece_bytes: int, *, mixed: bool = False) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device at a time, in order, in lists of about `piece_bytes`; of one dtype, if not `mixed`."""
    open_pieces: dict[tuple[torch.dtype | None, torch.device], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.dtype | None, torch.device], int] = {}
    for tensor in tensors:
        key = (None if mixed else tensor.dtype, tensor.device)
        open_pieces.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
        if sizes[key] >= piece_bytes:
            sizes[key] = 0
            yield open_pieces.pop(key)
    yield from open_pieces.values()
