"""What a communication hook is handed: a bucket, with the methods of torch's `GradBucket`, which Python cannot build."""

from __future__ import annotations

import torch

from phalanx.reducer.bucket import Bucket


class GradBucket:
    """A view of one bucket for one call of a hook. The buffer holds this rank's gradients, not yet divided."""

    def __init__(self, bucket: Bucket, buffer: torch.Tensor, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = buffer
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's number, in order of launch."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The flat buffer: write into it, or replace it with `set_buffer`."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The buffer's part of each parameter, shaped like it."""
        if self._bucket.spec.sparse:
            return [self._buffer]
        pieces = []
        for offset, slot in zip(self._bucket.spec.offsets, self._bucket.slots, strict=True):
            piece = self._buffer[offset : offset + slot.view.numel()]
            pieces.append(piece.as_strided(slot.view.shape, slot.view.stride(), piece.storage_offset()))
        return pieces

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return [slot.parameter for slot in self._bucket.slots]

    def is_last(self) -> bool:
        """Whether this is the last bucket of the step."""
        return self._is_last

    def __repr__(self) -> str:
        return f"GradBucket(index={self.index()}, numel={self._buffer.numel()}, is_last={self._is_last})"
