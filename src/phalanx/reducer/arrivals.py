"""What happens when a gradient is there: one by one through hooks of their own, or, once their order is known, in runs.

The common arrival (the first and only one of a parameter that is used once) is a closure of a few lines, `make_hook`.
Everything else goes through `arrive`. When two steps have shown the same order, most parameters are put on a roll
(`roll_call`): they are then only counted, and taken in together. When the order is not kept to, each is looked at again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NoReturn, Protocol

import torch

from phalanx import events
from phalanx.comm.device_wait import is_capturing
from phalanx.errors import ReducerStateError
from phalanx.reducer import grad_hooks, refusals
from phalanx.reducer.bucket import Bucket, ParameterSlot
from phalanx.reducer.grad_hooks import BackwardPasses, current_pass, has_other_hooks, without_grad
from phalanx.reducer.headroom import find_room, in_use
from phalanx.reducer.intake import Intake
from phalanx.reducer.options import Placement, ReducerOptions, ReducerStats
from phalanx.reducer.planner import Planner
from phalanx.reducer.roll_call import RollCall
from phalanx.reducer.runs import Run
from phalanx.reducer.streams import HOME, current_stream

MIN_ROLLED = 2
MAX_PATIENCE = 1024
_NO_PASS = -2  # no pass has this number: every arrival takes the long way


def on_several_devices(slots: Sequence[ParameterSlot]) -> bool:
    """Whether hooks may be called by several threads at a time: autograd's engine has one for each device."""
    return len({slot.bucket.spec.device for slot in slots}) > 1


class Mode(Enum):
    """What the backward pass under way does with its gradients."""

    SYNC = "sync"
    KEEP = "keep"


class Step(Protocol):
    """What arrivals need to know of the step they belong to, and what they set off in it."""

    name: str
    options: ReducerOptions
    stats: ReducerStats
    planner: Planner
    mode: Mode | None
    graph_changed: bool
    on_error: Callable[[str], None]

    @property
    def rank(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def has_learnt(self) -> bool: ...
    def begin_backward(self) -> None: ...
    def bucket_is_full(self, bucket: Bucket) -> None: ...
    def abandon(self) -> None: ...


class Arrivals:
    """Takes gradients in as they arrive, and says when a bucket is full."""

    def __init__(self, step: Step, intake: Intake, passes: BackwardPasses) -> None:
        self._step = step
        self._intake = intake
        self._passes = passes
        self._pass = _NO_PASS
        self.roll: RollCall | None = None
        """Once an order is known: those that are looked at in runs."""
        self.rolled = False
        """Whether all in the roll have come in this step, though their slots do not show it."""
        self._order_lost = False  # in this step
        self._came: list[ParameterSlot] | None = None  # while the order of arrival is recorded
        self._came_before: list[int] | None = None  # in the pass before: an order must come twice to be believed
        self._record_from = 0  # which step to record next, and how many to let pass if it is of no use
        self._patience = 1
        self._turns: threading.RLock | None = None
        """Where parameters lie on several devices: each has a thread of the engine's, and one arrives at a time."""

    # -- one by one ------------------------------------------------------------------------------------------------

    def make_hook(self, slot: ParameterSlot) -> Callable[[torch.Tensor], None]:
        """The plain arrival, in as few steps as possible: this may run once per parameter and step."""
        if slot.spread is not None:  # a call more is nothing beside what such a type costs in every operation
            return lambda _: self.arrive(slot)
        placement, intake = self._step.options.placement, self._intake
        owned, viewed = placement is Placement.OWNED, placement is Placement.VIEW

        def on_gradient(parameter: torch.Tensor) -> None:
            if current_pass() != self._pass or not slot.hot:
                self.arrive(slot)
                return
            slot.hot = False
            bucket = slot.bucket
            try:
                intake.store(parameter.grad, bucket.scale, out=slot.view)
            except RuntimeError:  # not of the kind that was planned for, say sparse
                self.arrive(slot)
                return
            slot.seen = 1
            slot.left = 0
            if owned:
                parameter.grad = None
            elif viewed:
                parameter.grad = slot.shown
            bucket.pending -= 1
            if not bucket.pending:
                self._step.bucket_is_full(bucket)

        return on_gradient

    def arrive(self, slot: ParameterSlot) -> None:
        """Any arrival: the first of a pass, one under a listener, a repeated, sparse, unexpected or unsynchronised one."""
        if self._turns is None:
            self._arrive(slot)
        else:
            with self._turns:
                self._arrive(slot)

    def _arrive(self, slot: ParameterSlot) -> None:
        step = self._step
        if step.mode is not None and self._passes.is_stale():
            step.abandon()  # an earlier pass was broken off unnoticed: this one is not part of it
        if step.mode is None:
            step.begin_backward()
            self._begin_roll()
        self._passes.enter()
        if slot.parameter.grad is None:
            return
        if step.mode is Mode.KEEP:
            slot.dirty = self._intake.irregular = True
            return
        with without_grad():
            self._accept(slot)
        if self._pass == _NO_PASS or current_pass() != self._pass:
            # Under create_graph gradients have a graph of their own, which the short way cannot copy from.
            recording = step.planner.arrivals is not None or self._came is not None
            plain = not (recording or self._turns or events.listeners or torch.is_grad_enabled())
            self._pass = current_pass() if plain else _NO_PASS

    def _accept(self, slot: ParameterSlot) -> None:
        step, bucket = self._step, slot.bucket
        slot.seen += 1
        slot.hot = False
        if step.planner.arrivals is not None and slot.seen == 1:
            step.planner.arrivals.append(slot.index)
        if self._came is not None and slot.seen == 1:
            self._came.append(slot)
            slot.stream = current_stream(bucket.spec.device)
            slot.in_use = in_use(bucket.spec.device)
        if events.listeners:
            events.emit(events.GradientReady(step.name, step.step, slot.name, bucket.index))
        owned = step.options.placement is Placement.OWNED
        if slot.left <= 0 or (not owned and slot.seen > max(slot.expected, 1)):
            self._accept_unexpected(slot)
            return
        slot.left -= 1
        # A static graph's first pass may bring more, which autograd adds up in .grad: it is filled when it is over.
        if owned or (slot.left == 0 and not (step.options.static and not step.has_learnt)):
            self._intake.fill(slot)
        if slot.left == 0:
            bucket.pending -= 1
            if not bucket.pending:
                step.bucket_is_full(bucket)

    def _accept_unexpected(self, slot: ParameterSlot, *others: ParameterSlot) -> None:
        """More arrivals than earlier passes had; where it is not known of which, of one of these."""
        options = self._step.options
        self._intake.irregular = True
        if options.static and self._step.has_learnt:
            self._step.graph_changed = True
            self._refuse(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                "but then got used in the second iteration. this is not compatible with static_graph set to True.",
                slot,
                *others,
            )
        if slot.seen > 1 and options.placement is not Placement.OWNED:
            if options.static:
                return
            self._refuse(
                "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
                "1) a module parameter is used outside the forward function, or shared by several concurrent "
                "forward-backward passes; 2) a parameter is reused in several reentrant backward passes, for example "
                "by checkpointing the same part twice. `static_graph=True` allows it if the graph never changes, and "
                "`phalanx.replicate` always does.",
                slot,
                *others,
            )
        self._intake.take_late(slot)

    def _refuse(self, message: str, *slots: ParameterSlot) -> NoReturn:
        step = self._step
        error = ReducerStateError(message, rank=step.rank, step=step.step, parameters=[slot.name for slot in slots])
        step.on_error(str(error))
        step.abandon()  # not left to the end of the pass: after an error in a hook the engine may keep it for long
        raise error

    # -- in runs ---------------------------------------------------------------------------------------------------

    def _begin_roll(self) -> None:
        """A pass has begun. Compiled autograd calls the hooks that it has found to the end of it: all is looked at then."""
        keeps, in_graph = self._step.mode is Mode.KEEP, grad_hooks.compiler.in_pass()
        if in_graph:  # who alternates with eager passes would have it compiled anew for each change of hooks
            self._patience = MAX_PATIENCE
        if self.roll is not None and not self.roll.begin(keep=keeps, in_graph=in_graph):
            self._lose_order()

    def _begin_by(self, parameter: torch.Tensor) -> bool:
        """One of the roll has come, and no pass is under way on it, or maybe another. False: there is no roll any more."""
        step = self._step
        if step.mode is not None and self._passes.is_stale():
            step.abandon()  # an earlier pass was broken off unnoticed: this one is not part of it
        if step.mode is None:
            step.begin_backward()
        if self.roll is not None and self.roll.is_open:
            self.roll.trust()
        else:
            self._begin_roll()
        self._passes.enter()
        if self.roll is not None:
            return True
        slot = step.planner.slot_of(parameter)  # the layout has just changed, or the order: and with it the hooks
        if slot is not None:
            self.arrive(slot)
        return False

    def doubt(self) -> None:
        """An inner pass has ended. What comes next may be another's, if the one around it was broken off."""
        if self.roll is not None:
            self.roll.doubt()

    def _take_run(self, run: Run, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """All of a run have come."""
        step = self._step
        try:
            with without_grad():
                self._intake.fill_run(run, parameters, gradients)
        except RuntimeError:  # some gradient is not of the kind that was planned for, say sparse
            assert self.roll is not None
            self.roll.put_back(run, parameters)
            self._lose_order()
            return
        for slot in run.slots if events.listeners else ():
            events.emit(events.GradientReady(step.name, step.step, slot.name, slot.bucket.index))
        for bucket, count in run.counts:
            bucket.pending -= count
            if not bucket.pending:
                step.bucket_is_full(bucket)

    def _lose_order(self) -> None:
        """A gradient has come that the roll cannot account for: look at each from here on."""
        self.call_the_rest()
        self.disband()

    def call_the_rest(self) -> None:
        """The pass is over, or its order lost: look at all that no run has taken in."""
        roll = self.roll
        if roll is None or not roll.is_open:
            return
        self.rolled = True
        if roll.complete:
            roll.stand_by()
            return
        device = roll.slots[0].bucket.spec.device
        if is_capturing(device):
            self._step.abandon()  # at the end of a pass nobody else would
            raise refusals.order_lost_in_capture(rank=self._step.rank, step=self._step.step)
        rest = roll.finish()
        on_gpu = bool(rest.arrived) and device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(device)  # in which streams they came is no longer known; once, when an order is lost
        self.show_rolled()
        self._intake.irregular = True
        self._order_lost = True
        for slot in (*rest.arrived, *rest.absent):
            slot.seen, slot.left, slot.hot = 0, 1, False
        with torch.no_grad():
            for slot in rest.arrived:
                self._accept(slot)
            for slot in rest.again:
                self._accept_repeated(slot)
        if on_gpu:  # what was copied here and let go of is memory of other streams, which may use it again at once
            torch.cuda.current_stream(device).synchronize()

    def _accept_repeated(self, slot: ParameterSlot) -> None:
        """One has come again: after a run had taken it in, or while its gradient waited for others, and was added to."""
        slot.seen += 1
        if self._step.options.placement is not Placement.OWNED:
            self._accept_unexpected(slot)
        elif slot.parameter.grad is not None:
            self._intake.take_late(slot)

    def show_rolled(self) -> None:
        """Let the slots of the roll say what has come for them, as those with a hook of their own do."""
        if self.rolled and self.roll is not None:
            for slot in self.roll.slots:
                slot.seen, slot.left, slot.hot = 1, 0, False
        self.rolled = False

    # -- passes and steps ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The buckets are ready for a step's gradients."""
        self.rolled = self._order_lost = False
        # Compiled autograd compiles anew for other hooks, so they stay what they are.
        due = self.roll is None and self._turns is None and self._step.stats.steps >= self._record_from
        self._came = [] if due and not grad_hooks.compiler.in_pass() else None

    def expect_nothing(self) -> None:
        """A step without a pass: nothing has come, and nothing will."""
        for slot in self.roll.slots if self.roll is not None else ():
            slot.seen, slot.left, slot.hot = 0, 1, False

    def mark_unreduced(self) -> None:
        """What no reduction has left in ``.grad`` came from elsewhere: it is this rank's own."""
        for slot in self._step.planner.layout.slots:
            if slot.parameter.grad is not None and slot.parameter.grad is not slot.shown:
                slot.dirty = self._intake.irregular = True

    def end_kept_pass(self) -> None:
        """A pass that kept its gradients is over: remember whose they are."""
        if self.roll is not None and self.roll.is_open:
            for slot in self.roll.finish().arrived:
                slot.dirty = self._intake.irregular = True

    def end_pass(self) -> None:
        """A pass that reduces its gradients is over."""
        self._pass = _NO_PASS
        if self.roll is not None:
            self.call_the_rest()

    def forget(self) -> None:
        """The step was broken off: it shows nothing of the graph."""
        self._pass = _NO_PASS
        self.rolled = False
        self._came = None
        if self.roll is not None:
            self.roll.stand_by()

    def learn(self, *, from_this_step: bool) -> None:
        """A step went through: put parameters on a roll, or take them off it again, by the order in which they came."""
        if self.roll is not None and self._order_lost:
            self.disband()
        elif self.roll is None and self._came is not None and from_this_step:
            self._form(self._came)
        self._came = None

    # -- the roll --------------------------------------------------------------------------------------------------

    def _form(self, came: Sequence[ParameterSlot]) -> None:
        """Two steps have shown the same order of arrival: from now on, look at those that came once in runs."""
        fit = [
            slot
            for slot in came
            if slot.seen == slot.expected == 1
            and not slot.bucket.spec.sparse
            and slot.spread is None
            and not has_other_hooks(slot.parameter)
        ]
        before, self._came_before = self._came_before, [id(slot) for slot in fit]
        if before != self._came_before or len(fit) < MIN_ROLLED or self._step.options.skip_unused_buckets:
            if before is not None:
                self._record_later()
            return
        self._came_before = None
        home = came[0].stream
        for slot in fit:
            slot.stream = HOME if slot.stream == home else slot.stream
        find_room(fit, kept=self._step.options.placement is Placement.COPY)
        self.roll = RollCall(fit, first=self._begin_by, take=self._take_run, lost=self._lose_order)
        self.lay_out()

    def forget_runs(self) -> None:
        """The buckets are let go: runs have views of them."""
        if self.roll is not None:
            self.roll.forget_runs()

    def lay_out(self) -> None:
        """The buckets were laid out anew: plan the runs for them, or disband where some parameters are gone."""
        layout = self._step.planner.layout
        several = on_several_devices(layout.slots)
        self._turns = (self._turns or threading.RLock()) if several else None
        if self.roll is None:
            return
        present = {id(slot) for slot in layout.slots if not slot.bucket.spec.sparse}
        if not several and all(id(slot) in present for slot in self.roll.slots):
            self.roll.lay_out()
            for slot, hook in self.roll.hooks():
                self._step.planner.rehook(slot, hook)
            layout.look_at_each(but=self.roll.slots)
        else:
            self.disband()

    def disband(self) -> None:
        """The order was lost: every parameter gets its own hook again."""
        if self.roll is None:
            return
        self.show_rolled()
        roll, self.roll = self.roll, None
        roll.forget_runs()  # it is freed by the garbage collector alone, which may be long in coming
        for slot in roll.slots:
            self._step.planner.rehook(slot)
        self._step.planner.layout.look_at_each()
        self._record_later()

    def _record_later(self) -> None:
        self._came_before = None
        self._record_from = self._step.stats.steps + self._patience
        self._patience = min(2 * self._patience, MAX_PATIENCE)
