"""What others ask of a reducer: the changes that may be made between steps, and steps without a backward pass.

A step itself is in `steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.comm.group import Group
from phalanx.reducer.arrivals import Mode
from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.carrier import BucketHook
from phalanx.reducer.options import ReducerOptions
from phalanx.reducer.planner import Named
from phalanx.reducer.steps import Steps
from phalanx.reducer.weights import Reduction


class Reducer(Steps):
    """Averages the gradients of some parameters over a group, in overlap with backward.

    Every rank of the group makes one with alike parameters and equal options, and every rank takes part in every step:
    by a backward pass that reaches a parameter, or by `synchronize`.
    """

    # -- changes, between steps: all ranks make them at the same point, alike --------------------------------------

    def replan(self, named_parameters: Named, *, sparse: Sequence[bool], reason: str) -> None:
        """Reduce these parameters from now on."""
        self.planner.replan(named_parameters, sparse=sparse, reason=reason)

    def reduce_now(self, indices: Sequence[int], share: float) -> None:
        """Average some gradients apart from any step; see `Carrier.reduce_now`."""
        self._carrier.reduce_now([self.slots[index] for index in indices], share)

    def replace_group(self, group: Group) -> None:
        """Reduce over another group from the next step on. What was learnt of the old one's order is learnt anew."""
        self._standing.drain_if_sound()
        self.reset()
        self._standing.begin_anew(group)
        self.planner.let_go()
        self.group.passes.discard(self._passes)
        self.group.unwatch(self)
        self.group = self.planner.group = group
        self._carrier.use(group)
        group.passes.add(self._passes)
        self._name_in(group)
        self._reports.forget()
        self.weighting.begin_anew(group.size)
        self.planner.start_over("a new group")

    def set_options(self, options: ReducerOptions) -> None:
        """Behave differently, from before the first step on; the placement of gradients must stay."""
        assert options.placement is self.options.placement and not self.stats.steps
        self.options = self.planner.options = options
        self.planner.let_go()
        self.planner.start_over("other options")

    def set_bucket_hook(self, hook: BucketHook | None) -> None:
        """Reduce buckets by a function of the caller's. It gets plain sums' place and must average by itself."""
        self._carrier.hook = hook
        self.planner.control_in_tail = hook is None and not self.options.skip_unused_buckets
        if not self.layout.rides:
            return
        # The control block must not pass through the hook: it travels by itself from now on.
        if self.planner.has_replanned or self.options.first_policy is None:
            self.planner.replan(reason="a hook was registered")
        else:
            self.planner.let_go()
            self.planner.start_over("a hook was registered")

    def communicate_alone(self) -> None:
        """Call the collectives also where the group has one rank: to measure on one device what they cost the host."""
        self._carrier.communicates = True

    def remove_hooks(self) -> None:
        self.planner.remove_hooks()

    def close(self) -> None:
        """Let the parameters go: gradients that lie in the buckets get memory of their own."""
        self._standing.drain()
        self.reset()
        self.remove_hooks()
        self.planner.let_go()

    # -- steps without a backward pass, and what is said of one --------------------------------------------------------

    def synchronize(self) -> None:
        """Take part in a step without a backward pass: reduce what is unsynchronised here, and zeros for the rest.

        Collective: it is this rank's part in the step that the other ranks take part in by a backward pass or likewise.
        """
        if self.mode is not None:
            self._passes.await_broken()
        if self.mode is Mode.SYNC:
            self.abandon() if self.options.settle_unused else self.reset()
        if not self._standing.is_clear:
            self._standing.check()
        self.arrivals.mark_unreduced()
        self.arrivals.expect_nothing()
        with torch.no_grad():
            self._begin_step()
        self._complete_step()

    def shadow(self, *, weight: float = 0.0) -> None:
        """Take part in the others' step with nothing, at this weight. What earlier passes have taught is not unlearnt.

        Nothing may be kept here for a later step: what lies in ``.grad`` is let go, and replaced by the others' average.
        """
        for slot in self.slots:
            slot.parameter.grad = None
            slot.dirty = False
        self.weighting.mine.clear()
        self.weighting.shadows = weight
        try:
            self.synchronize()
        finally:
            self.weighting.shadows = None

    @property
    def keeps(self) -> bool:
        """Whether there are gradients here that no step has taken along."""
        return any(slot.dirty for slot in self.slots)

    def set_weight(self, weight: float, reduction: Reduction = "mean") -> None:
        """This rank's share in the next step's average, in any unit (samples, tokens), on all ranks or on none.

        Given before each of several passes that a step adds up, or once for all of them.
        """
        factor = self.weighting.mine.add(weight, reduction, num_passes=self.stats.kept)
        if factor != 1.0:
            kept = [slot.parameter.grad for slot in self.slots if slot.dirty]
            with torch.no_grad():
                for gradient in kept:
                    if gradient is not None:
                        gradient.mul_(factor)

    def unfinished(self) -> list[ParameterSlot]:
        """What the step under way still waits for; empty between steps."""
        if self.mode is not None:
            self._passes.await_broken()  # another thread may be about to drop this step
        if self.mode is not Mode.SYNC and not self.graph_changed:
            return []
        waiting = [slot for slot in self.slots if slot.left > 0]
        return waiting or (list(self.slots) if self.graph_changed else [])
