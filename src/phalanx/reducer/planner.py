"""Keeping the layout right: made at construction, again when the order of arrival is known, or when parameters change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from phalanx.comm.group import DoneWork, Group, Work
from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.grad_hooks import GradientHook
from phalanx.reducer.layout import Layout
from phalanx.reducer.options import ReducerOptions
from phalanx.reducer.plan import BucketPolicy

Named = Sequence[tuple[str, torch.nn.Parameter]]


class Planner:
    """Owns the layout, the parameters' slots and their hooks. All ranks plan at the same points, with alike arguments."""

    layout: Layout

    def __init__(
        self,
        group: Group,
        options: ReducerOptions,
        *,
        make_hook: Callable[[ParameterSlot], Callable[[torch.Tensor], None]],
        on_plan: Callable[[str], None],
        on_release: Callable[[], None],
    ) -> None:
        self.group = group
        self.options = options
        self.control_in_tail = not options.skip_unused_buckets
        self.arrivals: list[int] | None = []
        """Order of arrival in the first step, while it is recorded."""
        self.arrival_order: list[int] = []
        self.has_replanned = False
        """Whether the agreed order has been applied."""
        self._make_hook = make_hook
        self._on_plan = on_plan
        self._on_release = on_release  # buckets are about to be let go: nothing may keep views of them
        self._slots: dict[int, ParameterSlot] = {}
        self._hooks: dict[int, GradientHook] = {}
        self._last_works: list[Work | None] = []  # as a bucket keeps its own: the interpreter may be about to end
        self.agreeing: tuple[Work, torch.Tensor] | None = None
        """Rank 0's order on its way here, to be applied before the next step."""

    # -- laying out ------------------------------------------------------------------------------------------------

    def start(self, named: Named, sparse: Sequence[bool], reason: str) -> None:
        """Plan for what is known at first: gradients arrive in reverse order of registration."""
        self.agreeing = None
        self.arrivals = []
        self.has_replanned = False
        first = self.options.first_policy
        order = list(range(len(named) - 1, -1, -1))
        self._lay_out(named, sparse, order, first or self.options.policy, reason, from_the_end=first is not None)

    def start_over(self, reason: str) -> None:
        """As at construction, with the parameters there are: the group or the options are others."""
        named = [(slot.name, slot.parameter) for slot in self.layout.slots]
        sparse = [spec.sparse for spec in self.layout.specs]
        self.start(named, sparse, reason)

    def let_go(self) -> None:
        """Give up the buckets' memory; gradients that lie in it get memory of their own."""
        self.layout.detach_gradients()
        self._last_works = [bucket.finished for bucket in self.layout.buckets if bucket.spec.device.type == "cpu"]
        self._on_release()
        self.layout.release(self.group)

    def replan(
        self,
        named: Named | None = None,
        *,
        sparse: Sequence[bool] | None = None,
        order: Sequence[int] | None = None,
        reason: str,
    ) -> None:
        """Lay out the buckets anew, between steps."""
        old = self.layout
        parameters = list(named or [(slot.name, slot.parameter) for slot in old.slots])
        if sparse is None:
            by_id = {id(slot.parameter): spec.sparse for slot, spec in zip(old.slots, old.specs, strict=True)}
            sparse = [by_id.get(id(parameter), False) for _, parameter in parameters]
        if order is None:
            order = self._order_for([parameter for _, parameter in parameters])
        # Free first, then allocate: the old and the new buckets together would take the gradients' memory twice.
        detached = old.detach_gradients()
        self._on_release()
        old.release(self.group)
        self._lay_out(parameters, sparse, order, self.options.policy, reason)
        with torch.no_grad():
            for slot in detached:  # back into the buckets, as before
                gradient = slot.parameter.grad
                if self._slots.get(id(slot.parameter)) is slot and gradient is not None and not slot.bucket.spec.sparse:
                    slot.parameter.grad = slot.shown
                    slot.view.copy_(slot.part(gradient))
        # A branch of the graph that has a stream of its own may add to one at once. It does not come after this stream.
        for device in {slot.bucket.spec.device for slot in detached if slot.bucket.spec.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _lay_out(
        self,
        named: Named,
        sparse: Sequence[bool],
        order: Sequence[int],
        policy: BucketPolicy,
        reason: str,
        *,
        from_the_end: bool = False,
    ) -> None:
        self._adopt(named)
        self.layout = Layout(
            [self._slots[id(parameter)] for _, parameter in named],
            sparse,
            order,
            policy,
            self.group,
            control_in_tail=self.control_in_tail,
            wire_dtype=self.options.wire_dtype,
            from_the_end=from_the_end,
        )
        self._on_plan(reason)

    def _adopt(self, named: Named) -> None:
        """Hook the parameters that are new, let go of those that are gone; the others keep their slot and its history."""
        wanted = {id(parameter) for _, parameter in named}
        for gone in [key for key in self._slots if key not in wanted]:
            del self._slots[gone]
            self._hooks.pop(gone).remove()
        for index, (name, parameter) in enumerate(named):
            if id(parameter) not in self._slots:
                slot = self._slots[id(parameter)] = ParameterSlot(index, name, parameter)
                self._hooks[id(parameter)] = GradientHook(parameter, self._make_hook(slot))

    def slot_of(self, parameter: torch.Tensor) -> ParameterSlot | None:
        return self._slots.get(id(parameter))

    def rehook(self, slot: ParameterSlot, hook: Callable[[torch.Tensor], None] | None = None) -> None:
        """Give a parameter another hook; its own again where none is given. One that was let go gets none."""
        known = self._hooks.get(id(slot.ref()))
        if known is not None:
            known.call(hook or self._make_hook(slot))

    def remove_hooks(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    # -- the order of arrival --------------------------------------------------------------------------------------

    def _order_for(self, parameters: Sequence[torch.nn.Parameter]) -> list[int]:
        """The order known so far, if that says where all of these come in; otherwise it is learnt anew."""
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        known = [self.layout.slots[index].ref() for index in self.layout.order]
        order = [place[id(parameter)] for parameter in known if id(parameter) in place]
        if self.agreeing is not None:  # agreed on, but for parameters that are no longer the same
            (work, _), self.agreeing = self.agreeing, None
            work.wait()
            self.arrivals = []
        if len(order) == len(parameters):
            return order
        self.arrivals = []
        return list(range(len(parameters) - 1, -1, -1))

    def agree_on_order(self) -> None:
        """After the first step: rank 0 tells the others in which order its gradients arrived. Once."""
        if self.arrivals is None:
            return
        seen, self.arrivals = self.arrivals, None
        self.arrival_order = seen
        if not self.options.replan or self.agreeing is not None:
            return
        arrived = set(seen)
        order = seen + [index for index in self.layout.order if index not in arrived]
        tensor = torch.tensor(order, dtype=torch.int64, device=self.layout.buckets[0].spec.device)
        work = self.group.broadcast(tensor, 0) if self.group.size > 1 else DoneWork()
        self.agreeing = (work, tensor)

    def apply_agreed_order(self) -> None:
        """Before the second step: plan by that order."""
        if self.agreeing is None:
            return
        (work, tensor), self.agreeing = self.agreeing, None
        work.wait()
        self.replan(
            order=[int(index) for index in self.group.read(tensor)], reason="the order in which gradients arrived"
        )
        self.has_replanned = True
