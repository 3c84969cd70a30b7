"""Sending buckets: the plain reduction, a hook in its place, sparse gradients, the control block, and second rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from phalanx.comm.group import DeferredWork, Group, ReduceKind, Work
from phalanx.reducer.bucket import Bucket, BucketState, ParameterSlot
from phalanx.reducer.intake import Intake
from phalanx.reducer.layout import Layout
from phalanx.reducer.options import Placement
from phalanx.reducer.skips import SkipAgreement


class HookedWork(Protocol):
    """What a bucket hook returns: a work whose value, once waited for, is also in the buffer if that is dense."""

    def wait(self, timeout_s: float | None = None) -> None: ...
    def done(self) -> bool: ...
    def then(self, action: Callable[[], None]) -> Work: ...
    def value(self) -> torch.Tensor: ...


BucketHook = Callable[[Bucket, torch.Tensor], HookedWork]
"""Reduces a bucket's gradients (second argument) in place of the plain all-reduce; it must average, too."""


class Carrier:
    """Starts reductions on a group. What it starts, in which order, is the same on every rank."""

    def __init__(self, group: Group, intake: Intake, *, skips_unused: bool) -> None:
        self.hook: BucketHook | None = None
        self.averages = False
        """Whether the group's own reduction divides by its size."""
        self._intake = intake
        self._skips = SkipAgreement() if skips_unused else None
        self.use(group)

    def use(self, group: Group) -> None:
        """Start reductions on this group from now on."""
        self.group = group
        self.communicates = group.size > 1
        """Whether collectives are called at all."""

    def begin(self, *, divisor: int | None) -> bool:
        """Settle how this step is averaged; returns whether gradients come undivided, to be averaged on the way.

        All ranks must call the same reduction, so this depends on nothing that may differ between them.
        """
        averages = self.group.averages and self.group.size > 1  # alone, a sum is one, and costs NCCL nothing
        self.averages = averages and divisor is None and self.hook is None
        return self.averages or self.hook is not None

    def launch(self, bucket: Bucket) -> bool:
        """Start a full bucket's reduction; False where it needs none."""
        bucket.advance(BucketState.READY)
        bucket.advance(BucketState.IN_FLIGHT)
        bucket.streams.join()
        if self._skips is not None and self._skips.leaves_out(bucket, self.group):
            return False
        if bucket.spec.sparse:
            bucket.work, bucket.sparse_sum = self._launch_sparse(bucket)
        elif self.hook is not None:
            bucket.work = self.hook(bucket, bucket.gradients).then(_nothing)
        elif self.communicates:
            bucket.work = self._reduce_on_wire(bucket)
        return True

    def _reduce_on_wire(self, bucket: Bucket) -> Work:
        kind: ReduceKind = "avg" if self.averages else "sum"
        wire, gradients = bucket.wire, bucket.gradients
        if wire is None:
            return self.group.all_reduce(bucket.buffer, kind)
        wire.copy_(gradients)
        return self.group.all_reduce(wire, kind).then(lambda: _copy(gradients, wire))

    def _launch_sparse(self, bucket: Bucket) -> tuple[Work, Callable[[], torch.Tensor]]:
        (slot,) = bucket.slots
        mine = as_sparse(slot, slot.parameter.grad)
        if not slot.seen:
            slot.stale = slot.parameter.grad
        if self._intake.placement is Placement.OWNED:
            slot.parameter.grad = None
        if self.hook is not None:
            hooked = self.hook(bucket, mine.coalesce())
            return hooked.then(_nothing), hooked.value
        return self.group.all_reduce_sparse(mine * self._share(bucket))

    def launch_control(self, layout: Layout) -> list[Work]:
        """Send the control block by itself, where it is not in the last bucket's tail."""
        control = layout.control_tensor
        if layout.rides or not self.communicates:
            return []
        if self.hook is None:
            return [self.group.all_reduce(control)]
        # A hook may start further collectives when its first are over: nothing may come between them.
        return [DeferredWork(lambda: self.group.all_reduce(control))]

    def second_round(self, bucket: Bucket) -> None:
        """Some rank got a gradient after this bucket had left. All ranks know, and reduce those apart."""
        share = self._share(bucket)
        if bucket.spec.sparse:
            (slot,) = bucket.slots
            work, total = self.group.all_reduce_sparse(as_sparse(slot, slot.late) * share)
            work.wait()
            slot.late = None
            assert slot.parameter.grad is not None
            slot.parameter.grad = (slot.parameter.grad + total()).coalesce()
            return
        extra = torch.zeros_like(bucket.gradients)
        for slot, offset in zip(bucket.slots, bucket.spec.offsets, strict=True):
            if slot.late is not None:
                piece = extra[offset : offset + slot.view.numel()]
                place = piece.as_strided(slot.view.shape, slot.view.stride(), piece.storage_offset())
                place.copy_(slot.late).mul_(share)
                slot.late = None
        if self.group.size > 1:
            self.group.all_reduce(extra).wait()
        bucket.gradients.add_(extra)

    def reduce_now(self, slots: Sequence[ParameterSlot], share: float) -> None:
        """Average the gradients of some parameters apart from any step: those that no bucket had a place for yet.

        Collective; `share` is this rank's part in the average. A parameter that has no gradient on any rank keeps none.
        """
        if not slots or self.group.size == 1:
            return
        with torch.no_grad():
            used = torch.tensor(
                [float(slot.parameter.grad is not None) for slot in slots], device=slots[0].parameter.device
            )
            self.group.all_reduce(used).wait()
            for slot, count in zip(slots, self.group.read(used), strict=True):
                if count:
                    self._reduce_one(slot, share)
            self.group.mark(used.device)

    def _reduce_one(self, slot: ParameterSlot, share: float) -> None:
        gradient = slot.gradient
        if slot.bucket.spec.sparse:
            work, total = self.group.all_reduce_sparse(as_sparse(slot, gradient) * share)
            work.wait()
            slot.parameter.grad = total()
            return
        whole = torch.zeros_like(slot.view) if gradient is None else gradient.to_dense() * share
        whole = whole.contiguous()
        self.group.all_reduce(whole).wait()
        slot.view.copy_(whole)
        slot.parameter.grad = slot.shown

    def _share(self, bucket: Bucket) -> float:
        """What a gradient is multiplied with before gradients are added up by a plain sum."""
        undivided = self.averages or self.hook is not None
        return float(bucket.scale) / self.group.size if undivided else float(bucket.scale)


def as_sparse(slot: ParameterSlot, gradient: torch.Tensor | None) -> torch.Tensor:
    """A gradient as a sparse tensor; none is one without entries."""
    if gradient is not None:
        return gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
    parameter = slot.parameter
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
        torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device),
        parameter.shape,
        device=parameter.device,
        check_invariants=False,
    )


def _nothing() -> None:
    return None


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source)
