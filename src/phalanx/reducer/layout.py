"""The parameters' places in buckets, made from a plan: what is rebuilt as a whole when the plan changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.comm.group import Group
from phalanx.reducer.bucket import Bucket, ParameterSlot, gradients_of
from phalanx.reducer.deferred import DeferredReport
from phalanx.reducer.order import LaunchOrder
from phalanx.reducer.plan import BucketPolicy, BucketSpec, ParameterSpec, plan_buckets
from phalanx.reducer.unused import ControlBlock

_data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
_CARRIES_CONTROL = (torch.float32, torch.float64)


class Layout:
    """Slots, buckets, their launch order, and where the control block travels.

    Making one is collective in so far as the group's `allocate` is: all ranks lay out alike, in the same order.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        sparse: Sequence[bool],
        order: Sequence[int],
        policy: BucketPolicy,
        group: Group,
        *,
        control_in_tail: bool,
        wire_dtype: torch.dtype | None = None,
        from_the_end: bool = False,
    ) -> None:
        self.slots = list(slots)
        self.specs = [
            ParameterSpec.of(slot.name, slot.part(slot.parameter), sparse=is_sparse)
            for slot, is_sparse in zip(slots, sparse, strict=True)
        ]
        self._refs = [slot.ref for slot in self.slots]
        self._spread = [slot for slot in self.slots if slot.spread is not None]
        self.order = list(order)
        self.pointers = self.current_pointers()
        planned = plan_buckets(self.specs, order, policy, from_the_end=from_the_end)
        self.rides = (
            control_in_tail
            and wire_dtype is None  # a cast would round it
            and bool(planned)
            and planned[-1].dtype in _CARRIES_CONTROL
            and not planned[-1].sparse
        )
        self.control = ControlBlock(
            num_parameters=len(self.slots),
            num_buckets=len(planned),
            rank=group.rank,
            size=group.size,
            dtype=planned[-1].dtype if self.rides else torch.float32,
        )
        self.buckets = [
            self._make_bucket(
                spec,
                group,
                num_extra=self.control.length if self.rides and spec is planned[-1] else 0,
                wire_dtype=wire_dtype,
            )
            for spec in planned
        ]
        device = planned[-1].device if planned else torch.device("cpu")
        tail = self.buckets[-1].tail if self.rides else None
        self.control_tensor = (
            tail if tail is not None else torch.zeros(self.control.length, dtype=self.control.dtype, device=device)
        )
        self.on_streams = group.waits_on_streams(device)
        self.deferred = DeferredReport(self.control, self.control_tensor) if self.on_streams else None
        self.launches = LaunchOrder(len(self.buckets))
        self.has_sparse = any(spec.sparse for spec in planned)
        self._dense = [slot for slot in self.slots if not slot.bucket.spec.sparse]
        self._dense_refs = [slot.ref for slot in self._dense]
        self._shown = [slot.shown for slot in self._dense]
        self._shown_parts = [slot.part(slot.shown) for slot in self._dense]
        self._addresses = list(map(_data_ptr, self._shown_parts))
        self.look_at_each()

    def _make_bucket(self, spec: BucketSpec, group: Group, *, num_extra: int, wire_dtype: torch.dtype | None) -> Bucket:
        """A bucket with its slots in their places."""
        bucket = Bucket(spec, self.specs, group, num_extra=num_extra, wire_dtype=wire_dtype)
        bucket.slots = [self.slots[index] for index in spec.parameters]
        # Where the others learn too late of a gradient that came after its bucket had left, none is guessed unused.
        waits_for_all = group.waits_on_streams(spec.device)
        for place, (slot, index) in enumerate(zip(bucket.slots, spec.parameters, strict=True)):
            slot.index = index
            slot.bucket = bucket
            slot.shown = _NOTHING
            slot.sticky = slot.sticky or waits_for_all
            if not spec.sparse:
                slot.view = bucket.views[place]
                slot.shown = slot.show()
        return bucket

    def look_at_each(self, *, but: Sequence[ParameterSlot] = ()) -> None:
        """Expect slots to say what has come for them, but for those that are looked at in runs."""
        rolled = {id(slot) for slot in but}
        self._individual = [slot for slot in self.slots if id(slot) not in rolled]
        for bucket in self.buckets:
            bucket.individual = [slot for slot in bucket.slots if id(slot) not in rolled]

    def current_pointers(self) -> list[int]:
        try:
            pointers = list(map(_data_ptr, map(operator.call, self._refs)))
        except TypeError:  # some parameter is gone
            pointers = [-1 if (parameter := ref()) is None else parameter.data_ptr() for ref in self._refs]
        for slot in self._spread:  # a tensor that is spread has no memory but its part's
            parameter = slot.ref()
            pointers.append(-1 if parameter is None else slot.part(parameter).data_ptr())
        return pointers

    def hand_out(self, *, mostly_there: bool = False) -> None:
        """Make every dense gradient the view of its bucket: the end of a step in which all was used."""
        if mostly_there and all(map(operator.is_, gradients_of(self._dense_refs), self._shown)):
            return
        for parameter, shown in zip(map(operator.call, self._dense_refs), self._shown, strict=True):
            if parameter is not None:
                parameter.grad = shown

    def first_change(self) -> str | None:
        """Which parameter no longer has the shape, dtype and device it was planned with; cheap when nothing moved."""
        pointers = self.current_pointers()
        if pointers == self.pointers:
            return None
        self.pointers = pointers
        for slot, spec in zip(self.slots, self.specs, strict=True):
            now = ParameterSpec.of(spec.name, slot.part(slot.parameter), sparse=spec.sparse)
            if now != spec:
                return f"{spec.name} is {now.shown()}, was {spec.shown()}"
        return None

    def start_step(self, *, certain: bool = False) -> None:
        """Expect what earlier passes had; `certain` means that a wrong guess is the user's error, not to be mended."""
        if list(map(_data_ptr, self._shown_parts)) != self._addresses:
            self._show_anew()
        for slot in self._individual:
            if slot.expected == 1 and slot.bucket.takes_hot:  # written out: this may run for every parameter
                slot.left = 1
                slot.hot = True
                slot.seen = 0
            else:
                slot.start_step(certain=certain)
        for bucket in self.buckets:
            bucket.start_step()
        self.launches.reset([bucket.pending == 0 for bucket in self.buckets])

    def _show_anew(self) -> None:
        """A user pointed a gradient elsewhere, or a cast of the module did: what they hold is theirs now."""
        for slot in self._dense:
            if slot.part(slot.shown).data_ptr() != slot.view.data_ptr():
                slot.shown = slot.show()
        self._shown = [slot.shown for slot in self._dense]
        self._shown_parts = [slot.part(slot.shown) for slot in self._dense]

    def detach_gradients(self) -> list[ParameterSlot]:
        """Give gradients that still lie in the buckets memory of their own, so that the buckets can be let go."""
        detached = [slot for slot in self._dense if getattr(slot.ref(), "grad", None) is slot.shown]
        for slot in detached:
            slot.parameter.grad = slot.shown.clone()
        return detached

    def release(self, group: Group) -> None:
        for bucket in self.buckets:
            buffer = bucket.buffer
            bucket.views = []
            for slot in bucket.slots:
                slot.view = slot.shown = _NOTHING
            bucket.buffer = bucket.gradients = _NOTHING
            bucket.tail = bucket.work = bucket.finished = None  # a work keeps what it has reduced
            group.release(buffer)
            if bucket.wire is not None:
                wire, bucket.wire = bucket.wire, None
                group.release(wire)
        self.control_tensor = _NOTHING
        self._shown = self._shown_parts = []


_NOTHING = torch.empty(0, device="cpu")
