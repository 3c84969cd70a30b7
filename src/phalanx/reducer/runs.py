"""Runs: parameters whose gradients came one after the other before, and are taken in together.

A gradient that is looked at by itself costs a call into Python and a kernel. Most need neither: if all of a run are
there when the last of them comes, they are copied into their bucket as one. How long a run may be is a matter of memory:
until it is taken in, its gradients lie beside the bucket, and on the CPU they should still be in the cache.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat

import torch

from phalanx.reducer.bucket import Bucket, ParameterSlot, gradients_of
from phalanx.reducer.streams import current_stream

RUN_BYTES_CPU = 1024 * 1024
RUN_BYTES_ELSEWHERE = 16 * 1024 * 1024
RUN_LENGTH = 128  # the gradients' own objects should be in the cache, too
# On the CPU, from this size on, multiplying while copying is cheaper than multiplying what was copied.
LARGE_BYTES_CPU = 1024 * 1024


class Run:
    """Some slots in the order of their arrival, and all that is needed to take them in without looking at each."""

    __slots__ = (
        "before",
        "counts",
        "device",
        "large",
        "pieces",
        "refs",
        "scales",
        "slots",
        "small",
        "small_views",
        "taken",
        "views",
    )

    def __init__(self, slots: Sequence[ParameterSlot]) -> None:
        self.slots = list(slots)
        self.refs = [slot.ref for slot in slots]
        self.views = [slot.view for slot in slots]
        self.scales = [slot.bucket.scale for slot in slots]
        self.large = [place for place, slot in enumerate(slots) if _is_large(slot)]
        self.small = [place for place, slot in enumerate(slots) if not _is_large(slot)]
        self.small_views = [self.views[place] for place in self.small]
        self.pieces = _pieces([slot for slot in slots if not _is_large(slot)])
        by_bucket: dict[int, list[Bucket]] = {}
        for slot in slots:
            by_bucket.setdefault(id(slot.bucket), []).append(slot.bucket)
        self.counts = [(members[0], len(members)) for members in by_bucket.values()]
        self.device = slots[0].bucket.spec.device
        self.taken = False
        self.before: list[tuple[torch.Tensor | None, int]] | None = None
        """Gradients, and their versions, that were there when the pass began; None where there were none."""

    @property
    def in_stream(self) -> bool:
        """On a GPU: whether the current stream is the one in which its gradients came before."""
        return self.device.type != "cuda" or current_stream(self.device) == self.slots[-1].stream

    def gradients(self) -> list[torch.Tensor | None]:
        return gradients_of(self.refs)

    def has_arrived(self, place: int, gradient: torch.Tensor | None) -> bool:
        """Whether this pass has brought the gradient: there was none before, or another, or it was added to."""
        if gradient is None:
            return False
        if self.before is None:
            return True
        earlier, version = self.before[place]
        return gradient is not earlier or gradient._version != version

    def all_arrived(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        if self.before is None:
            return all(map(operator.is_not, gradients, repeat(None)))
        return all(self.has_arrived(place, gradient) for place, gradient in enumerate(gradients))


def plan_runs(slots: Sequence[ParameterSlot]) -> list[Run]:
    """Cut a sequence of arrivals into runs: on one device, of bounded size, and none goes on when a bucket is full."""
    last_of = {id(slot.bucket): slot for slot in slots}
    cut: list[list[ParameterSlot]] = [[]]
    size = 0
    for slot, following in zip(slots, [*slots[1:], None], strict=True):
        device = slot.bucket.spec.device
        cut[-1].append(slot)
        size += slot.view.numel() * slot.view.element_size()
        full = size >= (RUN_BYTES_CPU if device.type == "cpu" else RUN_BYTES_ELSEWHERE) or len(cut[-1]) >= RUN_LENGTH
        if following is None:
            break
        elsewhere = following.bucket.spec.device != device or following.stream != slot.stream
        if full or elsewhere or last_of[id(slot.bucket)] is slot:
            cut.append([])
            size = 0
    return [Run(members) for members in cut if members]


def _is_large(slot: ParameterSlot) -> bool:
    view = slot.view
    return view.device.type == "cpu" and view.numel() * view.element_size() >= LARGE_BYTES_CPU


def _pieces(slots: Sequence[ParameterSlot]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of buckets that these slots cover, as few as possible, each with its bucket's factor."""
    spans: list[tuple[Bucket, int, int]] = []
    for slot in sorted(slots, key=lambda slot: (slot.bucket.index, slot.view.storage_offset())):
        start = int(slot.view.storage_offset() - slot.bucket.gradients.storage_offset())
        end = start + slot.view.numel()
        if spans and spans[-1][0] is slot.bucket and spans[-1][2] == start:
            spans[-1] = (slot.bucket, spans[-1][1], end)
        else:
            spans.append((slot.bucket, start, end))
    return [(bucket.gradients[start:end], bucket.scale) for bucket, start, end in spans]
