"""A step, from the first gradient to the average.

    gradient ready  →  bucket full  →  bucket launched, in order  →  backward over  →  settled  →  finalized

Gradients arrive through hooks, while autograd goes on with earlier layers. The common arrival (the first and only one of
a parameter that is used once) is a closure of a few lines, `_make_hook`. Everything else goes through `_arrive`.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn, Protocol

import torch

from phalanx import events
from phalanx.comm.group import DeferredWork, DoneWork, Group, Work
from phalanx.errors import GroupAbortedError, PeerFailedError, PeerLostError, PhalanxError, ReducerStateError
from phalanx.reducer.bucket import Bucket, BucketState, ParameterSlot
from phalanx.reducer.grad_hooks import BackwardPasses, current_pass, hook_gradient
from phalanx.reducer.layout import Layout
from phalanx.reducer.plan import BucketPolicy
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.verify import TensorEntry, verify_same

logger = logging.getLogger(__name__)

AGREE_WITHIN_S = 1800.0  # a rank may be long in coming, as to any collective
_NO_PASS = -2  # no pass has this number: every arrival takes the long way


class Placement(Enum):
    """Where gradients live."""

    OWNED = "owned"
    """In the buckets. ``.grad`` is empty while a bucket is on its way, so that a second gradient of the same parameter
    can arrive safely, and is a view of the bucket when backward returns."""
    VIEW = "view"
    """In the buckets, and ``.grad`` is the view from the moment the gradient arrives (torch's bucket views)."""
    COPY = "copy"
    """Where autograd put them: copied into the bucket and the average copied back (torch's default)."""


class Mode(Enum):
    """What the backward pass under way does with its gradients."""

    SYNC = "sync"
    KEEP = "keep"


@dataclass(frozen=True)
class ReducerOptions:
    """How a reducer behaves. Every rank must use equal options."""

    policy: BucketPolicy = field(default_factory=BucketPolicy)
    first_policy: BucketPolicy | None = None
    """Buckets until they are re-planned, where that differs; the first cap is then that of the last to leave."""
    placement: Placement = Placement.OWNED
    replan: bool = True
    """Lay out buckets anew, after the first step, in the order in which gradients really arrived."""
    settle_unused: bool = True
    """Settle, at the end of backward, what did not arrive; otherwise the step stays open until it has."""
    static: bool = False
    """Every pass has the same arrivals as the first; the first is reduced when it is over."""
    skip_unused_buckets: bool = False
    """Do not reduce a bucket of which nothing arrived. All ranks must then use the same parameters in every step."""


@dataclass
class StepTimes:
    """When the last step's parts began and ended, in nanoseconds of the monotonic clock."""

    first_gradient_ns: int = 0
    first_launch_ns: int = 0
    backward_end_ns: int = 0
    finalized_ns: int = 0


@dataclass
class ReducerStats:
    """Counters since construction."""

    steps: int = 0
    waited_s: float = 0.0
    """Time in which this rank stood still for reductions at the end of backward."""
    kept: int = 0
    """Backward passes that kept their gradients local."""
    num_plans: int = 0
    used_by: list[int] | None = None
    """By parameter, how many ranks used it in the last step; None where all used all."""
    buckets_launched: int = 0
    """In the last step."""
    graph_is_static: bool = True
    """Whether every step used the same parameters, on this rank."""
    times: StepTimes = field(default_factory=StepTimes)


class HookedWork(Protocol):
    """What a bucket hook returns: a work whose value, once waited for, is also in the buffer if that is dense."""

    def wait(self, timeout_s: float | None = None) -> None: ...
    def done(self) -> bool: ...
    def then(self, action: Callable[[], None]) -> Work: ...
    def value(self) -> torch.Tensor: ...


BucketHook = Callable[[Bucket, torch.Tensor], HookedWork]
"""Reduces a bucket's gradients (second argument) in place of the plain all-reduce; it must average, too."""


class Reducer:
    """Averages the gradients of some parameters over a group, in overlap with backward.

    Every rank of the group makes one with alike parameters and equal options, and every rank takes part in every step:
    by a backward pass that reaches a parameter, or by `synchronize`.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: Group,
        *,
        sparse: Sequence[bool] | None = None,
        options: ReducerOptions | None = None,
        name: str = "module",
    ) -> None:
        self.name = name
        self.group = group
        self._serial = group.next_serial()
        self.options = options or ReducerOptions()
        self.stats = ReducerStats()
        self.synchronizes = True
        """Read when a backward pass begins: False keeps its gradients local, to be reduced by a later pass."""
        self.gate: Callable[[], bool] | None = None
        """If set, asked when a pass begins whether it synchronises at all."""
        self.bucket_hook: BucketHook | None = None
        self.own_flags: Callable[[], Flag] | None = None
        """If set, asked at the end of a pass what else this rank has to tell the others."""
        self.on_report: list[Callable[[Report], None]] = []
        """Called on every rank, in the same order, when a step's gradients are averaged: may use the group."""
        self.on_error: Callable[[str], None] | None = None
        """If set, told the text of errors that this reducer raises in a hook, where nobody else can catch them."""
        self.arrivals: list[int] | None = []
        """Order of arrival in the first step, while it is recorded."""
        self.arrival_order: list[int] = []
        self.has_replanned = False
        """Whether the agreed order has been applied."""
        self.replanned_unseen = False
        self.divisor: int | None = None
        """What the sum is divided by, where that is not the number of ranks."""
        self.graph_changed = False
        """A static graph was found to have changed: nothing can be right any more."""
        self._weight: float | None = None
        self._weight_unit = 1.0  # about the mean weight in the last weighted step: large ones overflow half precision
        self._mode: Mode | None = None
        self._learnt = False  # whether a step went through: one that was broken off shows nothing of the graph
        self._irregular = False  # whether some parameter of this step did not arrive once, as it did before
        self._pass = _NO_PASS
        self._broken: PhalanxError | None = None
        self._draining: list[Work] = []
        self._order_work: tuple[Work, torch.Tensor] | None = None
        self._passes = BackwardPasses(on_end=self._end_of_backward, on_broken=self.abandon)
        self._slots: dict[int, ParameterSlot] = {}
        self._removers: dict[int, Callable[[], None]] = {}
        self._store: Callable[..., object] = torch.mul
        count = len(named_parameters)
        self._lay_out(
            named_parameters,
            sparse if sparse is not None else [False] * count,
            list(range(count - 1, -1, -1)),
            self.options.first_policy or self.options.policy,
            "construction",
            from_the_end=self.options.first_policy is not None,
        )

    # -- layout --------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[ParameterSlot]:
        return self.layout.slots

    @property
    def buckets(self) -> list[Bucket]:
        return self.layout.buckets

    @property
    def topic(self) -> str:
        """The step under way, as ranks name it to each other."""
        return f"step {self.step} of {self.name} ({self._serial})"

    @property
    def plan_topic(self) -> str:
        """The step under way with the buckets as they are, for a rank whose parameters no longer fit them."""
        return f"{self.topic}, laid out by plan {self.stats.num_plans}"

    @property
    def step(self) -> int:
        """The step under way or about to begin, from 1."""
        return self.stats.steps + 1

    def _lay_out(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        sparse: Sequence[bool],
        order: Sequence[int],
        policy: BucketPolicy,
        reason: str,
        *,
        from_the_end: bool = False,
    ) -> None:
        self._adopt(named_parameters)
        slots = [self._slots[id(parameter)] for _, parameter in named_parameters]
        in_tail = self.bucket_hook is None and not self.options.skip_unused_buckets
        self.layout = Layout(
            slots, sparse, order, policy, self.group, control_in_tail=in_tail, from_the_end=from_the_end
        )
        self.stats.num_plans += 1
        if events.listeners:
            events.emit(events.BucketsPlanned(self.name, self.step, reason, len(self.buckets)))

    def _adopt(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Hook the parameters that are new, let go of those that are gone; the others keep their slot and its history."""
        wanted = {id(parameter) for _, parameter in named_parameters}
        for gone in [key for key in self._slots if key not in wanted]:
            del self._slots[gone]
            self._removers.pop(gone)()
        for index, (name, parameter) in enumerate(named_parameters):
            if id(parameter) not in self._slots:
                slot = self._slots[id(parameter)] = ParameterSlot(index, name, parameter)
                self._removers[id(parameter)] = hook_gradient(parameter, self._make_hook(slot))

    def replan(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        *,
        sparse: Sequence[bool] | None = None,
        order: Sequence[int] | None = None,
        reason: str,
    ) -> None:
        """Lay out the buckets anew, between steps. All ranks do so at the same point, with alike arguments."""
        old = self.layout
        parameters = list(named_parameters or [(slot.name, slot.parameter) for slot in old.slots])
        if sparse is None:
            by_id = {id(slot.parameter): spec.sparse for slot, spec in zip(old.slots, old.specs, strict=True)}
            sparse = [by_id.get(id(parameter), False) for _, parameter in parameters]
        if order is None:
            order = self._order_for([parameter for _, parameter in parameters])
        # Free first, then allocate: the old and the new buckets together would take the gradients' memory twice.
        detached = old.detach_gradients()
        old.release(self.group)
        self._lay_out(parameters, sparse, order, self.options.policy, reason)
        with torch.no_grad():
            for slot in detached:  # back into the buckets, as before
                gradient = slot.parameter.grad
                if self._slots.get(id(slot.parameter)) is slot and gradient is not None and not slot.bucket.spec.sparse:
                    slot.parameter.grad = slot.shown
                    slot.view.copy_(gradient)

    def _order_for(self, parameters: Sequence[torch.nn.Parameter]) -> list[int]:
        """The order known so far, if that says where all of these come in; otherwise it is learnt anew."""
        place = {id(parameter): index for index, parameter in enumerate(parameters)}
        known = [self.slots[index].ref() for index in self.layout.order]
        order = [place[id(parameter)] for parameter in known if id(parameter) in place]
        if self._order_work is not None:  # agreed on, but for parameters that are no longer the same
            (work, _), self._order_work = self._order_work, None
            work.wait()
            self.arrivals = []
        if len(order) == len(parameters):
            return order
        self.arrivals = []
        return list(range(len(parameters) - 1, -1, -1))

    def replace_group(self, group: Group) -> None:
        """Reduce over another group from the next step on. What was learnt of the old one's order is learnt anew."""
        self._drain()
        self.reset()
        self.layout.detach_gradients()
        self.layout.release(self.group)
        self.group = group
        self._serial = group.next_serial()
        self._broken = None
        self._weight_unit = 1.0
        self._order_work = None
        self.arrivals = []
        self.has_replanned = False
        self._lay_out_first("a new group")

    def _lay_out_first(self, reason: str) -> None:
        """As at construction: in reverse order of registration."""
        named = [(slot.name, slot.parameter) for slot in self.slots]
        sparse = [spec.sparse for spec in self.layout.specs]
        policy = self.options.first_policy or self.options.policy
        order = list(range(len(named) - 1, -1, -1))
        self._lay_out(named, sparse, order, policy, reason, from_the_end=self.options.first_policy is not None)

    def set_options(self, options: ReducerOptions) -> None:
        """Behave differently, from before the first step on; the placement of gradients must stay."""
        assert options.placement is self.options.placement and not self.stats.steps
        self.options = options
        self.layout.release(self.group)
        self._lay_out_first("other options")

    def set_bucket_hook(self, hook: BucketHook | None) -> None:
        """Reduce buckets by a function of the caller's. It gets plain sums' place and must average by itself."""
        self.bucket_hook = hook
        if not self.layout.rides:
            return
        # The control block must not pass through the hook: it travels by itself from now on.
        if self.has_replanned or self.options.first_policy is None:
            self.replan(reason="a hook was registered")
        else:
            self.layout.detach_gradients()
            self.layout.release(self.group)
            self._lay_out_first("a hook was registered")

    def close(self) -> None:
        """Let the parameters go: gradients that lie in the buckets get memory of their own."""
        self._drain()
        self.reset()
        self.remove_hooks()
        self.layout.detach_gradients()
        self.layout.release(self.group)

    def reduce_now(self, indices: Sequence[int], share: float) -> None:
        """Average the gradients of some parameters apart from any step: those that no bucket had a place for yet.

        Collective; `share` is this rank's part in the average. A parameter that has no gradient on any rank keeps none.
        """
        slots = [self.slots[index] for index in indices]
        if not slots or self.group.size == 1:
            return
        with torch.no_grad():
            device = slots[0].parameter.device
            used = torch.tensor([float(slot.parameter.grad is not None) for slot in slots], device=device)
            self.group.all_reduce(used).wait()
            for slot, count in zip(slots, used.tolist(), strict=True):
                if count == 0:
                    continue
                gradient = slot.parameter.grad
                if slot.bucket.spec.sparse:
                    work, total = self.group.all_reduce_sparse(self._as_sparse(slot, gradient) * share)
                    work.wait()
                    slot.parameter.grad = slot.shown = total()
                    continue
                whole = torch.zeros_like(slot.view) if gradient is None else gradient.to_dense() * share
                whole = whole.contiguous()
                self.group.all_reduce(whole).wait()
                slot.view.copy_(whole)
                slot.parameter.grad = slot.shown

    def remove_hooks(self) -> None:
        for remove in self._removers.values():
            remove()
        self._removers.clear()

    # -- arrivals ------------------------------------------------------------------------------------------------

    def _make_hook(self, slot: ParameterSlot) -> Callable[[torch.Tensor], None]:
        """The plain arrival, in as few steps as possible: this runs once per parameter and step."""
        placement = self.options.placement
        owned, viewed = placement is Placement.OWNED, placement is Placement.VIEW

        def on_gradient(parameter: torch.Tensor) -> None:
            if current_pass() != self._pass or not slot.hot:
                self._arrive(slot)
                return
            slot.hot = False
            bucket = slot.bucket
            try:
                self._store(parameter.grad, bucket.scale, out=slot.view)
            except RuntimeError:  # not of the kind that was planned for, say sparse
                self._arrive(slot)
                return
            slot.seen = 1
            slot.left = 0
            if owned:
                parameter.grad = None
            elif viewed:
                parameter.grad = slot.shown
            bucket.pending -= 1
            if not bucket.pending:
                self._bucket_is_full(bucket)

        return on_gradient

    def _arrive(self, slot: ParameterSlot) -> None:
        """Any arrival: the first of a pass, one under a listener, a repeated, sparse, unexpected or unsynchronised one."""
        if self._mode is not None and self._passes.is_stale():
            self.abandon()  # an earlier pass was broken off unnoticed: this one is not part of it
        if self._mode is None:
            self._begin_backward()
        self._passes.enter()
        if slot.parameter.grad is None:
            return
        if self._mode is Mode.KEEP:
            slot.dirty = self._irregular = True
            return
        with torch.no_grad():
            self._accept(slot)
        if self._pass == _NO_PASS or current_pass() != self._pass:
            # Under create_graph gradients have a graph of their own, which the short way cannot copy from.
            plain = self.arrivals is None and not events.listeners and not torch.is_grad_enabled()
            self._pass = current_pass() if plain else _NO_PASS

    def _accept(self, slot: ParameterSlot) -> None:
        bucket = slot.bucket
        slot.seen += 1
        slot.hot = False
        if self.arrivals is not None and slot.seen == 1:
            self.arrivals.append(slot.index)
        if events.listeners:
            events.emit(events.GradientReady(self.name, self.step, slot.name, bucket.index))
        if slot.left <= 0 or (self.options.placement is not Placement.OWNED and slot.seen > max(slot.expected, 1)):
            self._accept_unexpected(slot)
            return
        slot.left -= 1
        # A static graph's first pass may bring more, which autograd adds up in .grad: it is filled when it is over.
        if self.options.placement is Placement.OWNED or (slot.left == 0 and not self._static_first):
            self._fill(slot)
        if slot.left == 0:
            bucket.pending -= 1
            if not bucket.pending:
                self._bucket_is_full(bucket)

    def _accept_unexpected(self, slot: ParameterSlot) -> None:
        """More arrivals than earlier passes had: into the bucket if it is still here, else into a second round."""
        self._irregular = True
        if self.options.static and self._learnt:
            self.graph_changed = True
            self._raise_in_hook(
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
                "but then got used in the second iteration. this is not compatible with static_graph set to True.",
                slot,
            )
        if slot.seen > 1 and self.options.placement is not Placement.OWNED:
            if self.options.static:
                return
            self._raise_in_hook(
                "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
                "1) a module parameter is used outside the forward function, or shared by several concurrent "
                "forward-backward passes; 2) a parameter is reused in several reentrant backward passes, for example "
                "by checkpointing the same part twice. `static_graph=True` allows it if the graph never changes, and "
                "`phalanx.replicate` always does.",
                slot,
            )
        if slot.bucket.state is BucketState.FILLING:
            self._fill(slot)
            return
        slot.sticky = slot.sticky or slot.seen == 1
        gradient = slot.parameter.grad
        assert gradient is not None
        gradient = gradient.detach()
        slot.late = gradient if slot.late is None else slot.late + gradient
        slot.parameter.grad = None

    def _raise_in_hook(self, message: str, slot: ParameterSlot) -> NoReturn:
        error = ReducerStateError(message, rank=self.group.rank, step=self.step, parameters=[slot.name])
        if self.on_error is not None:
            self.on_error(str(error))
        self.abandon()  # not left to the end of the pass: after an error in a hook the engine may keep it for long
        raise error

    def _fill(self, slot: ParameterSlot) -> None:
        """Put what is in ``.grad`` into the bucket: scaled, and added to what this pass has put there before."""
        bucket, parameter = slot.bucket, slot.parameter
        gradient = parameter.grad
        assert gradient is not None
        if bucket.spec.sparse:
            return  # a sparse gradient stays where it is until its bucket leaves
        gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.options.placement is Placement.OWNED and slot.seen > 1:
            slot.view.add_(gradient * bucket.scale if self._store is torch.mul else gradient)
        else:
            self._store(gradient, bucket.scale, out=slot.view)
        if self.options.placement is Placement.OWNED:
            parameter.grad = None
        elif self.options.placement is Placement.VIEW:
            parameter.grad = slot.shown

    def _bucket_is_full(self, bucket: Bucket) -> None:
        self.layout.launches.mark_ready(bucket.index)
        if not self._static_first:
            self._launch()

    # -- the step ------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        """The first gradient of a pass: decide what this pass does, and get the buckets ready."""
        self._check_not_broken()
        if not (self.gate is None or self.gate()) or not self.synchronizes:
            self._mode = Mode.KEEP
            self.stats.kept += 1
            return
        self._begin_step()

    def _begin_step(self) -> None:
        self._drain()
        change = None if self.layout.still_fits() else self.layout.first_change()
        self._apply_agreed_order()
        if change is not None:
            self._replan_for_new_layout(change)
        self._mode = Mode.SYNC
        weight = 1.0 if self._weight is None else self._weight / self._weight_unit
        averages = self.group.averages and self._weight is None and self.divisor is None
        plain = self.bucket_hook is not None or averages
        self._store = _copy if plain else torch.mul
        for bucket in self.buckets:
            bucket.scale.fill_(1.0 if plain else weight / (self.divisor or self.group.size))
        self.layout.start_step(certain=self.options.static and self._learnt)
        self.stats.buckets_launched = 0
        self.stats.times.first_gradient_ns = time.perf_counter_ns()
        if events.listeners:
            events.emit(events.StepStarted(self.name, self.step))

    def _end_of_backward(self) -> None:
        """The root pass is over."""
        if self._mode is Mode.KEEP:
            self._mode = None
        elif self._mode is Mode.SYNC:
            self._pass = _NO_PASS
            self.stats.times.backward_end_ns = time.perf_counter_ns()
            if not self.options.settle_unused and not self._static_first and not self.layout.launches.all_ready:
                return  # torch's contract: a later pass may complete it, or the next forward raises
            self._complete_step()

    @property
    def _static_first(self) -> bool:
        return self.options.static and not self._learnt

    def _complete_step(self) -> None:
        with torch.no_grad():
            topics = {self.topic, self.plan_topic}
            self.group.topics |= topics  # only while waiting: a step that stays open must not catch later notices
            try:
                self._settle()
                report = self._finalize(self._launch_rest(Flag(0)))
            except PhalanxError as error:
                if self._mode is not None:
                    self._break(error)
                    self.reset()
                raise
            except Exception as error:
                self._fail_in_bucket_hook(error)
                raise
            finally:
                self.group.topics -= topics
            try:
                for action in self.on_report:
                    action(report)
            except PhalanxError as error:  # all ranks compare at this point: each finds out by itself
                self._break(error, tell=False)
                raise

    def _check_not_broken(self) -> None:
        if self._broken is not None:
            raise copy.copy(self._broken)

    def _drop(self, error: PhalanxError) -> NoReturn:
        """All ranks read the same report, so all drop this step alike. They stay together and may train on."""
        self.reset()
        self.stats.steps += 1
        raise error

    def _break(self, error: PhalanxError, *, tell: bool = True) -> None:
        """This rank did not come to the end of what all ranks share, and no longer knows where the others are."""
        self._broken = copy.copy(error)  # without its traceback, which leads to the model: a circle through its hooks
        if tell and not isinstance(error, PeerLostError | GroupAbortedError):
            self.group.post_failure("", str(error))

    def reset(self) -> None:
        """Forget the step under way, on this rank alone: what was launched is waited for before the next begins."""
        self._draining += [bucket.work for bucket in self.buckets if bucket.work is not None]
        for bucket in self.buckets:
            bucket.work = None
        self._mode = None
        self._pass = _NO_PASS
        self._weight = None
        if self.arrivals:
            self.arrivals = []
        self._passes.forget()

    def abandon(self) -> None:
        """The backward pass raised. The other ranks wait for this step: give it to them, marked as failed.

        They raise an error that names this rank, and all ranks stay in step, so training may go on.
        """
        mode, self._pass = self._mode, _NO_PASS
        if mode is not Mode.SYNC or self._broken is not None:
            self.reset()
            return
        try:
            if self.bucket_hook is not None:  # what collectives a hook would run, nobody knows: tell them on the board
                self.group.post_failure(self.topic, "its backward pass raised")
            else:
                with torch.no_grad():
                    self._draining += self._launch_rest(Flag.FAILED)
        except Exception as error:  # called while another exception is on its way to the user: that one counts
            logger.warning("rank %d could not tell its peers that its backward failed: %s", self.group.rank, error)
        self.reset()
        self.stats.steps += 1

    def abandon_stale(self) -> None:
        """Give up a pass that was broken off unnoticed; called where no pass can be under way in this thread."""
        if self._mode is not None and self.options.settle_unused and current_pass() == -1:
            self.abandon()

    def synchronize(self) -> None:
        """Take part in a step without a backward pass: reduce what is unsynchronised here, and zeros for the rest.

        Collective: it is this rank's part in the step that the other ranks take part in by a backward pass or likewise.
        """
        if self._mode is Mode.SYNC:
            self.abandon() if self.options.settle_unused else self.reset()
        self._check_not_broken()
        for slot in self.slots:  # what no reduction has left there came from elsewhere: it is this rank's own
            if slot.parameter.grad is not None and slot.parameter.grad is not slot.shown:
                slot.dirty = True
        with torch.no_grad():
            self._begin_step()
        self._complete_step()

    def set_weight(self, weight: float | None) -> None:
        """This rank's share in the next step's average, in any unit (samples, tokens), on all ranks or on none."""
        self._weight = weight

    def _settle(self) -> None:
        """The pass is over: whatever has not arrived will not. Its place gets what this rank has for it, or zeros."""
        for bucket in self.buckets:
            if bucket.state is not BucketState.FILLING:
                continue
            for slot in bucket.slots:
                if self._static_first and slot.seen and self.options.placement is not Placement.OWNED:
                    self._fill(slot)
                elif not slot.seen or slot.left > 0:
                    self._settle_slot(slot)
            self.layout.launches.mark_ready(bucket.index)

    def _settle_slot(self, slot: ParameterSlot) -> None:
        self._irregular = True
        gradient = slot.parameter.grad
        if slot.seen:  # fewer arrivals than before; what has come counts
            if self.options.placement is not Placement.OWNED:
                self._fill(slot)
        elif slot.dirty and gradient is not None:
            slot.seen = 1
            self._fill(slot)
        elif not slot.bucket.spec.sparse:
            self._fill_absent(slot)

    def _fill_absent(self, slot: ParameterSlot) -> None:
        """No gradient of this pass. An old one that the user kept counts in the average, and stays if nobody used it."""
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
            return
        slot.stale = gradient.clone() if gradient is slot.shown else gradient
        self._store(slot.stale.detach(), slot.bucket.scale, out=slot.view)

    def unfinished(self) -> list[ParameterSlot]:
        """What the step under way still waits for; empty between steps."""
        if self._mode is not Mode.SYNC and not self.graph_changed:
            return []
        waiting = [slot for slot in self.slots if slot.left > 0]
        return waiting or (list(self.slots) if self.graph_changed else [])

    # -- launching -----------------------------------------------------------------------------------------------

    def _launch(self, *, backward_is_over: bool = False) -> None:
        for index in self.layout.launches.launchable(backward_is_over=backward_is_over):
            bucket = self.buckets[index]
            if not backward_is_over:
                for slot in bucket.slots:
                    if not slot.seen:  # predicted unused
                        self._settle_slot(slot)
            self._launch_bucket(bucket)

    def _launch_bucket(self, bucket: Bucket) -> None:
        bucket.advance(BucketState.READY)
        self.stats.buckets_launched += 1
        if self.stats.buckets_launched == 1:
            self.stats.times.first_launch_ns = time.perf_counter_ns()
        if self.options.skip_unused_buckets and not any(slot.seen for slot in bucket.slots):
            self.stats.buckets_launched -= 1
        elif bucket.spec.sparse:
            bucket.work, bucket.sparse_sum = self._launch_sparse(bucket)
        elif self.bucket_hook is not None:
            bucket.work = self._run_bucket_hook(bucket, bucket.gradients).then(_nothing)
        elif self.group.size == 1:
            bucket.work = None
        else:
            bucket.work = self.group.all_reduce(bucket.buffer, "avg" if self._store is _copy else "sum")
        bucket.advance(BucketState.IN_FLIGHT)
        if events.listeners:
            events.emit(events.BucketLaunched(self.name, self.step, bucket.index, bucket.spec.num_bytes))

    def _launch_sparse(self, bucket: Bucket) -> tuple[Work, Callable[[], torch.Tensor]]:
        (slot,) = bucket.slots
        mine = self._as_sparse(slot, slot.parameter.grad)
        if not slot.seen:
            slot.stale = slot.parameter.grad
        if self.options.placement is Placement.OWNED:
            slot.parameter.grad = None
        if self.bucket_hook is not None:
            hooked = self._run_bucket_hook(bucket, mine.coalesce())
            return hooked.then(_nothing), hooked.value
        return self.group.all_reduce_sparse(mine * self._share(bucket))

    def _run_bucket_hook(self, bucket: Bucket, gradients: torch.Tensor) -> HookedWork:
        assert self.bucket_hook is not None
        try:
            return self.bucket_hook(bucket, gradients)
        except Exception as error:
            self._fail_in_bucket_hook(error)
            raise

    def _fail_in_bucket_hook(self, error: Exception) -> None:
        """A bucket hook raised. Which collectives it has left undone nobody knows: ranks that wait are told to give up."""
        if self._mode is Mode.SYNC:
            self.group.post_failure(self.topic, f"its communication hook raised {type(error).__name__}: {error}")
            self.reset()
            self.stats.steps += 1

    def _as_sparse(self, slot: ParameterSlot, gradient: torch.Tensor | None) -> torch.Tensor:
        if gradient is not None:
            return gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)
        spec = self.layout.specs[slot.index]
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=spec.device),
            torch.empty(0, *spec.shape[1:], dtype=spec.dtype, device=spec.device),
            spec.shape,
            check_invariants=False,
        )

    def _share(self, bucket: Bucket) -> float:
        """What a gradient is multiplied with before gradients are added up."""
        return 1.0 / self.group.size if self._store is _copy else float(bucket.scale)

    def _launch_rest(self, flags: Flag) -> list[Work]:
        """Launch everything that is left, with this rank's report in the last bucket's tail or behind it."""
        if self.own_flags is not None:
            flags |= self.own_flags()
        if self._weight is not None:
            flags |= Flag.WEIGHTED
        launches = self.layout.launches
        if flags & Flag.FAILED:
            for bucket in self.buckets:
                if bucket.state is BucketState.FILLING:
                    launches.mark_ready(bucket.index)
        layout = self.layout
        if not layout.rides:
            self._launch(backward_is_over=True)
        used, late = None, []
        if self._irregular or flags & Flag.FAILED:
            used = None if all(slot.seen for slot in layout.slots) else [slot.seen > 0 for slot in layout.slots]
            late = [bucket.index for bucket in self.buckets if any(slot.late is not None for slot in bucket.slots)]
        weight = 1.0 if self._weight is None else self._weight
        assert layout.control_tensor is not None
        layout.control.write(layout.control_tensor, used=used, late=late, weight=weight, flags=flags)
        if layout.rides:
            self._launch(backward_is_over=True)
        works = [bucket.work for bucket in self.buckets if bucket.work is not None]
        if not layout.rides and self.group.size > 1:
            control = layout.control_tensor
            if self.bucket_hook is None:
                works.append(self.group.all_reduce(control))
            else:  # a hook may start further collectives when its first are over: nothing may come between them
                works.append(DeferredWork(lambda: self.group.all_reduce(control)))
        return works

    # -- finalizing ----------------------------------------------------------------------------------------------

    def _finalize(self, works: list[Work]) -> Report:
        """Wait for all reductions, read the report, and hand the averages out."""
        waited_s = self._wait_for(works)
        layout = self.layout
        assert layout.control_tensor is not None
        averaged = layout.rides and self._store is _copy and self.group.size > 1
        report = layout.control.read(layout.control_tensor, averaged=averaged)
        self._raise_for_failed(report)
        for bucket in self.buckets:
            if bucket.sparse_sum is not None:  # taken back by `_restore` where no rank used it
                bucket.slots[0].parameter.grad = bucket.sparse_sum()
        for index in report.late:
            self._second_round(self.buckets[index])
        self._apply_weights(report)
        for bucket in self.buckets:
            if bucket.spec.sparse and (gradient := bucket.slots[0].parameter.grad) is not None:
                bucket.slots[0].shown = gradient
        unused = self._hand_out(report.used)
        self._learn(report)
        self.stats.steps += 1
        self.stats.waited_s += waited_s
        self.stats.times.finalized_ns = time.perf_counter_ns()
        self.stats.used_by = report.used
        self._mode = None
        self._weight = None
        self._passes.forget()
        for bucket in self.buckets:
            bucket.work, bucket.finished = None, bucket.work
        if events.listeners:
            events.emit(events.StepFinalized(self.name, self.stats.steps, waited_s, unused))
        return report

    def _wait_for(self, works: list[Work]) -> float:
        began = time.perf_counter()
        if not events.listeners:
            for work in works:
                work.wait()
        else:
            for bucket in self.buckets:
                start = time.perf_counter()
                if bucket.work is not None:
                    bucket.work.wait()
                events.emit(
                    events.BucketReduced(self.name, self.step, bucket.index, time.perf_counter() - start)
                )
            for work in works[len([b for b in self.buckets if b.work is not None]) :]:
                work.wait()
        for bucket in self.buckets:
            bucket.advance(BucketState.REDUCED)
        return time.perf_counter() - began

    def _raise_for_failed(self, report: Report) -> None:
        failed = report.ranks_with(Flag.FAILED)
        if failed:
            cause = self.group.failure_of(failed[0], self.topic)
            error = PeerFailedError(
                f"rank {failed[0]} raised in its backward pass{f' ({cause})' if cause else ''}; "
                "this step's gradients are dropped on every rank",
                failed_ranks=failed,
                rank=self.group.rank,
                step=self.step,
            )
            self._drop(error)

    def _apply_weights(self, report: Report) -> None:
        weighted = report.ranks_with(Flag.WEIGHTED)
        if not weighted:
            return
        missing = [rank for rank in range(self.group.size) if rank not in weighted]
        total = sum(report.weights)
        wrong = ""
        if missing:
            wrong = f"ranks {weighted} gave a weight for this step, ranks {missing} did not: give one on all, or on none"
        elif total <= 0:
            wrong = f"the weights of all ranks add up to {total:g}: at least one must be positive"
        if wrong:
            self._drop(ReducerStateError(wrong, rank=self.group.rank, step=self.step))
        for bucket in self.buckets:
            if bucket.spec.sparse:
                gradient = bucket.slots[0].parameter.grad
                if gradient is not None:
                    bucket.slots[0].parameter.grad = gradient * (self.group.size * self._weight_unit / total)
            else:
                bucket.gradients.mul_(self.group.size * self._weight_unit / total)
        self._weight_unit = 2.0 ** round(math.log2(total / self.group.size))  # a power of two rounds nothing

    def _second_round(self, bucket: Bucket) -> None:
        """Some rank got a gradient after this bucket had left. All ranks know, and reduce those apart."""
        share = self._share(bucket)
        if bucket.spec.sparse:
            (slot,) = bucket.slots
            work, total = self.group.all_reduce_sparse(self._as_sparse(slot, slot.late) * share)
            work.wait()
            slot.late = None
            assert slot.parameter.grad is not None
            slot.parameter.grad = (slot.parameter.grad + total()).coalesce()
            return
        extra = torch.zeros_like(bucket.gradients)
        offsets = dict(zip(bucket.spec.parameters, bucket.spec.offsets, strict=True))
        for slot in bucket.slots:
            if slot.late is not None:
                piece = extra[offsets[slot.index] : offsets[slot.index] + slot.view.numel()]
                piece.as_strided(slot.view.shape, slot.view.stride(), piece.storage_offset()).copy_(slot.late).mul_(share)
                slot.late = None
        if self.group.size > 1:
            self.group.all_reduce(extra).wait()
        bucket.gradients.add_(extra)

    def _hand_out(self, used: list[int] | None) -> tuple[str, ...]:
        """Put the averages where the user looks for them; returns the names of what no rank used."""
        copy = self.options.placement is Placement.COPY
        if used is None and not copy:
            self.layout.hand_out()
            return ()
        unused = []
        targets, sources = [], []
        for slot in self.slots:
            if used is not None and not used[slot.index]:
                unused.append(slot.name)
                self._restore(slot)
            elif not slot.bucket.spec.sparse:
                if not copy:
                    slot.parameter.grad = slot.shown
                elif slot.parameter.grad is None:
                    slot.parameter.grad = slot.view.clone()
                else:
                    targets.append(slot.parameter.grad.detach())
                    sources.append(slot.view)
        if targets:
            torch._foreach_copy_(targets, sources)
        return tuple(unused)

    def _restore(self, slot: ParameterSlot) -> None:
        """No rank used it: whatever gradient was there before this step is there again, to the bit."""
        if slot.stale is None:
            slot.parameter.grad = None
        elif slot.bucket.spec.sparse or slot.stale is slot.parameter.grad:
            slot.parameter.grad = slot.stale
        else:
            slot.view.copy_(slot.stale)
            slot.parameter.grad = slot.shown

    def _learn(self, report: Report) -> None:
        """Expect next time what came this time; and agree, once, on the order in which gradients arrive."""
        for slot in self.slots if self._irregular else ():
            slot.dirty = False
            slot.stale = None
            if slot.seen != slot.expected:
                if self._learnt and (slot.seen == 0) != (slot.expected == 0):
                    self.stats.graph_is_static = False
                slot.expected = slot.seen
        self._irregular = False
        self._learnt = True
        if self.arrivals is None:
            return
        seen, self.arrivals = self.arrivals, None
        self.arrival_order = seen
        if not self.options.replan or self._order_work is not None:
            return
        rest = set(seen)
        order = seen + [index for index in self.layout.order if index not in rest]
        tensor = torch.tensor(order, dtype=torch.int64, device=self.buckets[0].spec.device)
        if self.group.size > 1:
            self._order_work = (self.group.broadcast(tensor, 0), tensor)
        else:
            self._order_work = (DoneWork(), tensor)

    def _apply_agreed_order(self) -> None:
        if self._order_work is None:
            return
        (work, tensor), self._order_work = self._order_work, None
        work.wait()
        order = [int(index) for index in tensor.tolist()]
        self.replan(order=order, reason="the order in which gradients arrived")
        self.has_replanned = self.replanned_unseen = True

    def _replan_for_new_layout(self, change: str) -> None:
        """Parameters were cast, moved or resized in place. Ranks must have done so alike: they compare before going on."""
        entries = [TensorEntry.of(slot.name, slot.parameter, "parameter") for slot in self.slots]
        # Ranks where nothing changed do not come here: they wait in this step, and read this there.
        self.group.post_failure(self.plan_topic, f"its parameters changed, and not here: {change}")
        try:
            verify_same(self.group, entries, timeout_s=AGREE_WITHIN_S)
        except PhalanxError as error:
            self._break(error, tell=False)
            raise
        self.replan(reason="parameters changed dtype, shape or device")

    def _drain(self) -> None:
        """What an abandoned step has launched must be over before its buffers are used again."""
        works, self._draining = self._draining, []
        for work in works:
            try:
                work.wait()
            except PhalanxError as error:
                self._break(error)
                raise


def _nothing() -> None:
    return None


def _copy(gradient: torch.Tensor, _: torch.Tensor, *, out: torch.Tensor) -> None:
    out.copy_(gradient)
