"""The end of a step: averages put where the user looks for them, and what no rank used left as it was."""

from __future__ import annotations

import torch

from phalanx.reducer.bucket import Bucket, ParameterSlot
from phalanx.reducer.layout import Layout
from phalanx.reducer.options import Placement


def hand_out(layout: Layout, placement: Placement, used: list[int] | None) -> tuple[str, ...]:
    """Set every ``.grad``; `used` is None where every rank used every parameter. Returns the names of what none used."""
    if used is None and placement is not Placement.COPY:
        layout.hand_out(mostly_there=placement is Placement.VIEW)
        return ()
    unused, targets, sources = [], [], []
    for slot in layout.slots:
        parameter = slot.parameter
        if used is not None and not used[slot.index]:
            unused.append(slot.name)
            _restore(slot)
        elif slot.bucket.spec.sparse:
            continue
        elif placement is not Placement.COPY:
            parameter.grad = slot.shown
        elif parameter.grad is None:
            parameter.grad = slot.shown.clone()
        else:
            targets.append(slot.part(parameter.grad).detach())
            sources.append(slot.view)
    if targets:
        torch._foreach_copy_(targets, sources)
    return tuple(unused)


def _restore(slot: ParameterSlot) -> None:
    """No rank used it: whatever gradient was there before this step is there again, to the bit."""
    if slot.stale is None:
        slot.parameter.grad = None
    elif slot.bucket.spec.sparse or slot.stale is slot.parameter.grad:
        slot.parameter.grad = slot.stale
    else:
        slot.view.copy_(slot.part(slot.stale))
        slot.parameter.grad = slot.shown


def rescale(buckets: list[Bucket], factor: float) -> None:
    """Multiply all averages, dense in their buckets and sparse in their parameters."""
    for bucket in buckets:
        if not bucket.spec.sparse:
            bucket.gradients.mul_(factor)
        elif (gradient := bucket.slots[0].parameter.grad) is not None:
            bucket.slots[0].parameter.grad = gradient * factor
