"""How a gradient gets into its bucket: scaled by this rank's share, added up if it comes twice, zeros if it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.reducer.bucket import Bucket, BucketState, ParameterSlot
from phalanx.reducer.options import Placement
from phalanx.reducer.runs import Part, Run


class Intake:
    """Fills buckets from ``.grad``. One per reducer; `begin` sets it up for a step."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.store: Callable[..., object] = torch.mul
        """Writes ``(gradient, factor, out=view)``."""
        self.irregular = False
        """Whether some parameter of this step did not arrive once, as it did before: nothing is then taken for granted."""
        self._begun: tuple[Sequence[Bucket], float] | None = None

    def begin(self, buckets: Sequence[Bucket], factor: float) -> None:
        """Multiply with `factor` on the way in."""
        if self._begun is not None and self._begun[0] is buckets and self._begun[1] == factor:
            return  # as in the last step
        self._begun = (buckets, factor)
        self.store = _copy if factor == 1.0 else torch.mul
        for bucket in buckets:
            bucket.multiply_by(factor)

    def fill(self, slot: ParameterSlot) -> None:
        """Put what is in ``.grad`` into the bucket, added to what this pass has put there before."""
        bucket, parameter = slot.bucket, slot.parameter
        gradient = slot.gradient
        assert gradient is not None
        if bucket.spec.sparse:
            return  # a sparse gradient stays where it is until its bucket leaves
        gradient = _dense(gradient)
        if self.placement is Placement.OWNED and slot.seen > 1:
            bucket.streams.join()  # it may have come in another stream before
            slot.view.add_(gradient if self.store is _copy else gradient * bucket.scale)
        else:
            self.store(gradient, bucket.scale, out=slot.view)
        bucket.streams.note()
        if self.placement is Placement.OWNED:
            parameter.grad = None
        elif self.placement is Placement.VIEW:
            parameter.grad = slot.shown

    def fill_run(self, run: Run, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Put the gradients of a run into their buckets, as one, where none was before."""
        lies_there = gradients[0] is run.slots[0].shown  # after `zero_grad(set_to_none=False)` most do
        if self.store is _copy:
            for part in run.parts:
                _copy_part(part, gradients, some_lie_there=lies_there)
        else:
            # What multiplies comes last: if a gradient cannot be copied, all of them are looked at again, one by one.
            for part in run.small_parts:
                _copy_part(part, gradients, some_lie_there=lies_there)
            for place in run.large:
                torch.mul(gradients[place], run.scales[place], out=run.views[place])
            for piece, scale in run.pieces:
                piece.mul_(scale)
        if run.on_gpu:
            for bucket, _ in run.counts:
                bucket.streams.note()
        if self.placement is Placement.OWNED:
            for parameter in parameters:
                parameter.grad = None
        elif self.placement is Placement.VIEW:  # communication hooks may look at it
            for parameter, slot in zip(parameters, run.slots, strict=True):
                parameter.grad = slot.shown

    def take_late(self, slot: ParameterSlot) -> None:
        """One more than was expected: into the bucket if it is still here, else aside, for a second round."""
        if slot.bucket.state is BucketState.FILLING:
            self.fill(slot)
            return
        slot.sticky = slot.sticky or slot.seen == 1
        gradient = slot.gradient
        assert gradient is not None
        gradient = gradient.detach() if slot.bucket.spec.sparse else _dense(gradient)
        slot.late = gradient if slot.late is None else slot.late + gradient
        slot.parameter.grad = None

    def settle(self, slot: ParameterSlot) -> None:
        """Nothing more comes for this parameter: its place gets what this rank has for it, or zeros."""
        self.irregular = True
        gradient = slot.parameter.grad
        if slot.seen:  # fewer arrivals than before; what has come counts
            if self.placement is not Placement.OWNED:
                self.fill(slot)
        elif slot.dirty and gradient is not None:
            slot.seen = 1
            self.fill(slot)
        elif not slot.bucket.spec.sparse:
            self._fill_absent(slot)

    def _fill_absent(self, slot: ParameterSlot) -> None:
        """No gradient of this pass. An old one that the user kept counts in the average, and stays if nobody used it."""
        if slot.gradient is None:
            slot.view.zero_()
            return
        gradient = slot.parameter.grad
        assert gradient is not None
        slot.stale = gradient.clone() if gradient is slot.shown else gradient
        self.store(_dense(slot.part(slot.stale)), slot.bucket.scale, out=slot.view)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """As a bucket takes it, also where it was planned for another kind."""
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _copy_part(part: Part, gradients: list[torch.Tensor], *, some_lie_there: bool) -> None:
    """Copy a run's gradients to their places in buckets, but for those that autograd has added up there."""
    slots, views, places = part
    if places is not None:
        gradients = [gradients[place] for place in places]
    if some_lie_there:
        apart = [place for place, slot in enumerate(slots) if gradients[place] is not slot.shown]
        views, gradients = [views[place] for place in apart], [gradients[place] for place in apart]
    if gradients:
        torch._foreach_copy_(views, gradients)


def _copy(gradient: torch.Tensor, _: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(gradient)
