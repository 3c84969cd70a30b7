"""Runs: parameters whose gradients came one after the other before, and are taken in together.

A gradient that is looked at by itself costs a call into Python and a kernel. Most need neither: if all of a run are
there when the last of them comes, they are copied into their bucket as one. How long a run may be is a matter of memory:
until it is taken in, its gradients lie beside the bucket. On the CPU they should still be in the cache. On a GPU, where a
run costs the host much the same however long it is, it may take half of the room that there is below the peak (`headroom`),
within bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.reducer.bucket import Bucket, ParameterSlot
from phalanx.reducer.plan import MIB
from phalanx.reducer.streams import HOME, current_stream

RUN_BYTES_CPU = MIB
RUN_LENGTH_CPU = 128  # the gradients' own objects should be in the cache, too
RUN_BYTES_GPU = (2 * MIB, 256 * MIB)  # at least, where there is no room; and at most
RUN_LENGTH_GPU = 512
BLOCK_BYTES_GPU = 512  # what is allocated there is a multiple of this
# On the CPU, from this size on, multiplying while copying is cheaper than multiplying what was copied. Such a gradient ends
# its run: of two in a run the first could be multiplied twice, where it lies in its bucket and the second cannot be copied.
LARGE_BYTES_CPU = RUN_BYTES_CPU


class Part(NamedTuple):
    """Members of a run that are copied as one."""

    slots: list[ParameterSlot]
    views: list[torch.Tensor]
    places: list[int] | None
    """In the run; None where they are all of it."""


class Run:
    """Some slots in the order of their arrival, and all that is needed to take them in without looking at each."""

    __slots__ = (
        "counts",
        "device",
        "large",
        "on_gpu",
        "parts",
        "pieces",
        "refs",
        "scales",
        "slots",
        "small_parts",
        "stream",
        "taken",
        "views",
    )

    def __init__(self, slots: Sequence[ParameterSlot]) -> None:
        self.slots = list(slots)
        self.refs = [slot.ref for slot in slots]
        self.views = [slot.view for slot in slots]
        self.scales = [slot.bucket.scale for slot in slots]
        self.large = [place for place, slot in enumerate(slots) if _is_large(slot)]
        small = [place for place, slot in enumerate(slots) if not _is_large(slot)]
        self.parts = _parts(self.slots, range(len(slots)))
        self.small_parts = _parts(self.slots, small)
        self.pieces = _pieces([self.slots[place] for place in small])
        by_bucket: dict[int, list[Bucket]] = {}
        for slot in slots:
            by_bucket.setdefault(id(slot.bucket), []).append(slot.bucket)
        self.counts = [(members[0], len(members)) for members in by_bucket.values()]
        self.device = slots[0].bucket.spec.device
        self.stream = slots[-1].stream
        self.on_gpu = self.device.type == "cuda"
        self.taken = False

    def let_go(self) -> None:
        """Its buckets are given up: keep none of their memory."""
        self.views, self.parts, self.small_parts, self.pieces = [], [], [], []

    def in_stream(self, home: int) -> bool:
        """On a GPU: whether the current stream is the one in which its gradients came before."""
        return not self.on_gpu or current_stream(self.device) == (home if self.stream == HOME else self.stream)

    def in_order(self, came: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The same in the order of the run, if they are all of it, each once; None if not."""
        if len(came) != len(self.refs):
            return None
        if all(map(operator.is_, came, map(operator.call, self.refs))):  # nearly always: written for speed
            return came
        by_id = {id(parameter): parameter for parameter in came}
        members = [id(ref()) for ref in self.refs]
        return [by_id[member] for member in members] if by_id.keys() == set(members) else None


def plan_runs(slots: Sequence[ParameterSlot]) -> list[Run]:
    """Cut a sequence of arrivals into runs: on one device, of bounded size, and none goes on when a bucket is full."""
    last_of = {id(slot.bucket): slot for slot in slots}
    cut: list[list[ParameterSlot]] = [[]]
    size = 0
    for slot, following in zip(slots, [*slots[1:], None], strict=True):
        device = slot.bucket.spec.device
        cut[-1].append(slot)
        size += _size_of(slot)
        if following is None:
            break
        elsewhere = following.bucket.spec.device != device or following.stream != slot.stream
        # What has come so far would lie beside the bucket when the next one comes: there must be room then.
        if _is_long(device, len(cut[-1]), size, following.room) or elsewhere or last_of[id(slot.bucket)] is slot:
            size = 0
            cut.append([])
    return [Run(members) for members in cut if members]


def _is_long(device: torch.device, length: int, num_bytes: int, room: int) -> bool:
    """Whether a run of this length and size is to end."""
    if device.type == "cpu":
        return length >= RUN_LENGTH_CPU or num_bytes >= RUN_BYTES_CPU
    least, most = RUN_BYTES_GPU
    return length >= RUN_LENGTH_GPU or num_bytes >= min(max(least, room // 2), most)


def _size_of(slot: ParameterSlot) -> int:
    num_bytes = int(slot.view.numel() * slot.view.element_size())
    if slot.bucket.spec.device.type == "cpu":
        return num_bytes
    return -(-num_bytes // BLOCK_BYTES_GPU) * BLOCK_BYTES_GPU


def _is_large(slot: ParameterSlot) -> bool:
    view = slot.view
    return view.device.type == "cpu" and view.numel() * view.element_size() >= LARGE_BYTES_CPU


def _parts(slots: Sequence[ParameterSlot], places: Sequence[int]) -> list[Part]:
    """One for each dtype: torch copies tensors of several dtypes one by one."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place in places:
        by_dtype.setdefault(slots[place].view.dtype, []).append(place)
    return [
        Part(
            [slots[place] for place in members],
            [slots[place].view for place in members],
            None if len(members) == len(slots) else members,
        )
        for members in by_dtype.values()
    ]


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
