"""Broadcasting many tensors as few: one flat message per dtype and device, in pieces of bounded size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from phalanx.comm.group import Group, Work

PIECE_BYTES = 64 * 1024 * 1024


def broadcast_coalesced(
    group: Group, tensors: Sequence[torch.Tensor], *, source: int, piece_bytes: int = PIECE_BYTES
) -> None:
    """Give every rank the source's values, in place. All ranks pass alike tensors in the same order."""
    if group.size == 1:
        return
    with torch.no_grad():
        started: deque[_Started] = deque()
        for piece in pieces(tensors, piece_bytes):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in piece])
            started.append((group.broadcast(flat, source), flat, piece))
            if len(started) > 1:  # two at a time: one is on the wire while the other is packed or unpacked
                _finish(started.popleft(), keep=group.rank == source)
        while started:
            _finish(started.popleft(), keep=group.rank == source)


_Started = tuple[Work, torch.Tensor, list[torch.Tensor]]


def _finish(started: _Started, *, keep: bool) -> None:
    work, flat, piece = started
    work.wait()
    if not keep:
        for tensor, part in zip(piece, flat.split([tensor.numel() for tensor in piece]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))


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
