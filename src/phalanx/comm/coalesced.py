"""Broadcasting many tensors as few: one flat message per dtype and device, in pieces of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from phalanx.comm.group import Group, Work

PIECE_BYTES = 64 * 1024 * 1024
KEPT_BYTES = 16 * 1024 * 1024  # memory of a piece that is sent again and again stays, up to this size


class Piece:
    """Tensors of one dtype and device that travel together: the flat memory in which they do, and a view of it for each."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first = tensors[0]
        self.dtype, self.device = first.dtype, first.device
        self._shapes = [tensor.shape for tensor in tensors]
        self._sizes = [tensor.numel() for tensor in tensors]
        is_small = sum(self._sizes) * first.element_size() <= KEPT_BYTES
        self._kept = self._make() if is_small else None

    def _make(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.inference_mode(False):  # what is kept is used outside of it as well
            flat = torch.empty(sum(self._sizes), dtype=self.dtype, device=self.device)
        return flat, [part.view(shape) for part, shape in zip(flat.split(self._sizes), self._shapes, strict=True)]

    def room(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The memory and its views, with nothing in them."""
        return self._kept or self._make()


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
        broadcast_pieces(group, ((Piece(members), members) for members in pieces(tensors, piece_bytes)), source=source)


def broadcast_pieces(group: Group, given: Iterable[tuple[Piece, Sequence[torch.Tensor]]], *, source: int) -> None:
    """Likewise, of tensors that were made into pieces before."""
    is_source = group.rank == source
    with torch.no_grad():
        started: deque[_Started] = deque()
        for piece, members in given:
            flat, views = piece.room()
            if is_source:
                copy_together(views, members)
            started.append((group.broadcast(flat, source), views, members))
            if len(started) > 1:  # two at a time: one is on the wire while the other is packed or unpacked
                _finish(started.popleft(), is_source=is_source)
        while started:
            _finish(started.popleft(), is_source=is_source)


_Started = tuple[Work, list[torch.Tensor], Sequence[torch.Tensor]]


def _finish(started: _Started, *, is_source: bool) -> None:
    work, views, members = started
    work.wait()
    if not is_source:
        copy_together(members, views)


def pieces(tensors: Iterable[torch.Tensor], piece_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device at a time, in order, in lists of about `piece_bytes`."""
    open_pieces: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        open_pieces.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
        if sizes[key] >= piece_bytes:
            sizes[key] = 0
            yield open_pieces.pop(key)
    yield from open_pieces.values()
