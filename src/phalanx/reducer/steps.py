"""A step, from the first gradient to the average.

    gradient ready  →  bucket full  →  bucket launched, in order  →  backward over  →  settled  →  finalized

How gradients arrive is `arrivals`', what is done with one `intake`'s, with a full bucket `carrier`'s, with an average
`hand_out`'s; where everything lies is `planner`'s; what ranks tell each other of a step is `reports`', and whether they can
go on after one that broke off is `breaking_off`'s and `standing`'s. Here is when.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from phalanx import events
from phalanx.comm.device_wait import is_capturing
from phalanx.comm.group import Group, Work
from phalanx.errors import PeerFailedError, PhalanxError
from phalanx.reducer.arrivals import Arrivals, Mode
from phalanx.reducer.bucket import Bucket, BucketState, ParameterSlot
from phalanx.reducer.carrier import BucketHook, Carrier
from phalanx.reducer.grad_hooks import BackwardPasses
from phalanx.reducer.hand_out import hand_out, rescale
from phalanx.reducer.intake import Intake
from phalanx.reducer.layout import Layout
from phalanx.reducer.options import Placement, ReducerOptions, ReducerStats
from phalanx.reducer.planner import Named, Planner
from phalanx.reducer.reports import Reports
from phalanx.reducer.spans import StepSpans
from phalanx.reducer.standing import AGREE_WITHIN_S, Standing
from phalanx.reducer.telling import Telling
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.verify import TensorEntry, verify_same
from phalanx.reducer.weights import Weighting

logger = logging.getLogger(__name__)


class Steps(Telling):
    """One step after another: what each consists of, and when. `Reducer` is what others see of it."""

    def __init__(
        self,
        named_parameters: Named,
        group: Group,
        *,
        sparse: Sequence[bool] | None = None,
        options: ReducerOptions | None = None,
        name: str = "module",
    ) -> None:
        self.name = name
        self.group = group
        self.options = options or ReducerOptions()
        self.stats = ReducerStats()
        self.gate: Callable[[], bool] = lambda: True
        """Asked when a pass begins: False keeps its gradients local, to be reduced by a later pass."""
        self.hold: Callable[[], bool] = lambda: False
        """Asked when a bucket is full: True keeps it until `launch_ready`, or to the end of the pass."""
        self.own_flags: Callable[[], int] = lambda: Flag.NONE
        """Asked at the end of a pass: what else this rank has to tell the others."""
        self.before_step: Callable[[], None] | None = None
        """Called on every rank before a step's first collective: may use the group, and raise instead of the step."""
        self.on_change: Callable[[Report], None] = lambda report: None
        """Called on every rank before those of `on_report` when some rank's parameters are not what was agreed on."""
        self.on_report: list[Callable[[Report], None]] = []
        """Called on every rank, in the same order, when a step's gradients are averaged."""
        self.behind_step: Callable[[Report], None] = lambda report: None
        """Called before those: may use the group. In a step that `may_be_read_late` it is called on every rank in any case,
        also on one whose pass failed, as ranks that do not know of it yet will have called it; and what collectives it runs
        must not depend on a report that only some have read."""
        self.on_error: Callable[[str], None] = lambda message: None
        """Told the text of errors that this reducer raises in a hook, where nobody else can catch them."""
        self.divisor: int | None = None
        """What the sum is divided by, where that is not the number of ranks."""
        self.graph_changed = False
        """A static graph was found to have changed: nothing can be right any more."""
        self.layout: Layout
        self.slots: list[ParameterSlot]
        self.buckets: list[Bucket]
        self.label = ""
        """The module, as ranks name it to each other: alike on all of them, and no other's in this group."""
        self._name_in(group)
        self.weighting = Weighting(group.size)
        self.mode: Mode | None = None
        self._overlaps = False  # whether buckets leave in this step as soon as they are full
        self._learnt = False  # whether a step went through: one that was broken off shows nothing of the graph
        self._standing = Standing(group)
        self._reports = Reports()
        self._passes = BackwardPasses(
            on_end=self._end_of_backward, on_broken=self.abandon, on_inner_end=self._end_of_inner_pass
        )
        group.passes.add(self._passes)
        self._intake = Intake(self.options.placement)
        self._carrier = Carrier(
            group,
            self._intake,
            skips_unused=self.options.skip_unused_buckets,
        )
        self.arrivals = Arrivals(self, self._intake, self._passes)
        self.planner = Planner(
            group,
            self.options,
            make_hook=self.arrivals.make_hook,
            on_plan=self._planned,
            on_release=self.arrivals.forget_runs,
        )
        self.planner.start(named_parameters, sparse or [False] * len(named_parameters), "construction")

    # -- what it is made of ----------------------------------------------------------------------------------------

    @property
    def bucket_hook(self) -> BucketHook | None:
        return self._carrier.hook

    @property
    def has_learnt(self) -> bool:
        """Whether a step has shown how often each gradient comes."""
        return self._learnt

    @property
    def all_arrived(self) -> bool:
        """At the end of a pass: whether every parameter's gradient has come in it, as often as expected."""
        return self._learnt and self.mode is Mode.SYNC and not self._intake.irregular

    def _name_in(self, group: Group) -> None:
        self.label = f"{self.name} ({group.next_serial()})"

    def _planned(self, reason: str) -> None:
        self.layout = self.planner.layout
        self.slots, self.buckets = self.layout.slots, self.layout.buckets
        self.stats.num_plans += 1
        self.arrivals.lay_out()
        if self.layout.on_streams:
            self.group.watch(self)
        self._spans = StepSpans(self.name, self.buckets)
        if events.listeners:
            events.emit(events.BucketsPlanned(self.name, self.step, reason, len(self.buckets)))

    # -- buckets that are full -------------------------------------------------------------------------------------

    def bucket_is_full(self, bucket: Bucket) -> None:
        """All that a bucket waits for has come."""
        self.layout.launches.mark_ready(bucket.index)
        if self._overlaps and not self.hold():
            self._launch()

    def enter_pass(self) -> None:
        """Called in a pass: end one's step in it before any other reducer that enters it later."""
        self._passes.enter()

    def launch_ready(self) -> None:
        """Launch the full buckets that were held."""
        if self.mode is Mode.SYNC and not self._static_first:
            with torch.no_grad():
                self._launch()

    # -- the step --------------------------------------------------------------------------------------------------

    # What runs in every step is written with few calls: it runs once, where forward and backward have left the caches to
    # something else, and each function that is called there for the first time since costs as much as twenty warm ones.

    def begin_backward(self) -> None:
        """The first gradient of a pass: decide what this pass does, and get the buckets ready."""
        if not self._standing.is_clear:
            self._standing.check()
        if self.gate():
            self._begin_step()
        else:
            self.mode = Mode.KEEP
            self.stats.kept += 1

    def _begin_step(self) -> None:
        weighting = self.weighting
        if weighting.mine.given or self.before_step is not None:
            self._refuse_capture()
        if self._reports.awaited is not None:
            self._hear_of_last_step()
        if self.before_step is not None:
            self.before_step()
        try:
            if not self._standing.is_clear:
                self._settle_standing()
            change = self.layout.first_change()
            if self.planner.agreeing is not None:
                self.planner.apply_agreed_order()
            if change is not None:
                self._replan_for_new_layout(change)
        except PhalanxError as error:  # in what all ranks do here: there are no buckets to go on with
            self._break(error, tell=False)
            raise
        self.mode = Mode.SYNC
        undivided = self._carrier.begin(divisor=self.divisor)
        factor = weighting.factor if weighting.mine.given else 1.0
        self._intake.begin(self.buckets, factor if undivided else factor / (self.divisor or self.group.size))
        self.layout.start_step(certain=self.options.static and self._learnt)
        # Before it is known how often gradients come: a static graph is reduced when its first pass is over; and where
        # waits are on streams the others could not be told in time of one too many.
        self._overlaps = self._learnt or not (self.options.static or self.layout.on_streams)
        self.arrivals.begin_step()
        self.stats.buckets_launched = 0
        self.stats.times.first_gradient_ns = time.perf_counter_ns()
        if events.listeners:
            events.emit(events.StepStarted(self.name, self.step))

    def _settle_standing(self) -> None:
        self._standing.settle(self.step)
        device = self.layout.control_tensor.device
        if not is_capturing(device):  # this stream waits for what a broken-off step has sent; others fill buckets, too
            self.group.await_device(device)

    def _end_of_backward(self) -> None:
        """The root pass is over."""
        if self.mode is Mode.KEEP:
            self.mode = None
            self.arrivals.end_kept_pass()
        elif self.mode is Mode.SYNC:
            self.stats.times.backward_end_ns = time.perf_counter_ns()
            self.arrivals.end_pass()
            if not (self.options.settle_unused or self.layout.launches.all_ready or self._static_first):
                self.arrivals.disband()
                return  # torch's contract: a later pass may complete it, or the next forward raises
            self._complete_step()

    def _end_of_inner_pass(self) -> None:
        self.arrivals.doubt()

    @property
    def _static_first(self) -> bool:
        return self.options.static and not self._learnt

    def _complete_step(self) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._complete_step()
            return
        with self._spans.finalize:
            self.group.undertakings.append(self)  # only now: a step that stays open must not catch later notices
            try:
                self._settle()
                report = self._finalize(self._launch_rest(Flag.NONE))
            except PhalanxError as error:
                if self.mode is not None:
                    if self._carrier.hook is not None and isinstance(error, PeerFailedError):
                        self._part("waited")
                    else:
                        self._break(error)
                        self.reset()
                raise
            except Exception as error:
                self._fail_in_bucket_hook(error)
                raise
            finally:
                self.group.undertakings.remove(self)
            try:
                changed = report.has(Flag.CHANGED)
                at_once = changed and not self.may_be_read_late
                if at_once:
                    self.on_change(report)
                self.behind_step(report)
                self._reports.fetch(self.layout)
                for action in self.on_report:
                    action(report)
                if changed and not at_once:  # others read of it in the next step, when they have done all this
                    self.on_change(report)
            except PhalanxError as error:  # all ranks compare at this point: each finds out by itself
                self._break(error, tell=False)
                raise
            self._reports.raise_hindsight()

    def _replan_for_new_layout(self, change: str) -> None:
        """Parameters were cast, moved or resized in place. Ranks must have done so alike: they compare before going on."""
        entries = [TensorEntry.of(slot.name, slot.parameter, "parameter") for slot in self.slots]
        # Ranks where nothing changed do not come here: they wait in this step, and read this there.
        self.group.post_failure(self._plan_topic, f"its parameters changed, and not here: {change}")
        answer = f"{self._plan_topic}, answered"
        self.group.topics.add(answer)
        try:
            verify_same(self.group, entries, timeout_s=AGREE_WITHIN_S)
        finally:
            self.group.topics.discard(answer)
        self.planner.replan(reason="parameters changed dtype, shape or device")

    # -- settling and launching ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The pass is over: whatever has not arrived will not."""
        fills_now = not self._learnt and self._static_first and self.options.placement is not Placement.OWNED
        for bucket in self.buckets:
            if bucket.state is not BucketState.FILLING:
                continue
            for slot in bucket.individual if self.arrivals.rolled else bucket.slots:
                if fills_now and slot.seen:
                    self._intake.fill(slot)
                elif not slot.seen or slot.left > 0:
                    self._intake.settle(slot)
            self.layout.launches.mark_ready(bucket.index)

    def _launch(self, *, backward_is_over: bool = False) -> None:
        for index in self.layout.launches.launchable(backward_is_over=backward_is_over):
            bucket = self.buckets[index]
            if not backward_is_over:
                for slot in bucket.individual:
                    if not slot.seen:  # predicted unused
                        self._intake.settle(slot)
            self._launch_bucket(bucket)

    def _launch_bucket(self, bucket: Bucket) -> None:
        if not self.stats.buckets_launched:
            self.stats.times.first_launch_ns = time.perf_counter_ns()
        try:
            with self._spans.launch[bucket.index]:
                self.stats.buckets_launched += self._carrier.launch(bucket)
        except Exception as error:
            if self._carrier.hook is not None:
                self._fail_in_bucket_hook(error)
            raise
        if events.listeners:
            events.emit(events.BucketLaunched(self.name, self.step, bucket.index, bucket.spec.num_bytes))

    def _launch_rest(self, flags: int) -> list[Work]:
        """Launch everything that is left, with this rank's report in the last bucket's tail or behind it."""
        layout, weighting = self.layout, self.weighting
        flags |= self.own_flags()
        if not weighting.is_plain:
            flags |= weighting.flags
        if flags & Flag.FAILED:
            for bucket in self.buckets:
                if bucket.state is BucketState.FILLING:
                    layout.launches.mark_ready(bucket.index)
        if not layout.rides:
            self._launch(backward_is_over=True)
        if flags or self._intake.irregular:
            self._say(flags)
        else:
            self._reports.say_nothing(layout)
        if layout.on_streams and self._must_read_now:
            self._refuse_capture()
        if self._carrier.communicates:
            self._reports.write(layout)
        if layout.rides:
            self._launch(backward_is_over=True)
        works = [bucket.work for bucket in self.buckets if bucket.work is not None]
        return works if layout.rides else works + self._carrier.launch_control(layout)

    # -- finalizing ------------------------------------------------------------------------------------------------

    def _finalize(self, works: list[Work]) -> Report:
        """Wait for all reductions, read the report, and hand the averages out."""
        waited_s = self._wait_for(works)
        layout, carrier, stats = self.layout, self._carrier, self.stats
        averaged = layout.rides and carrier.averages and self.group.size > 1
        now = not layout.on_streams or self._must_read_now
        report = self._reports.read(
            layout, communicates=carrier.communicates, averaged=averaged, now=now, by=self.group
        )
        if report is not layout.control.nothing:
            self._raise_for(report)
        for bucket in self.buckets if layout.has_sparse else ():
            if bucket.sparse_sum is not None:  # taken back in handing out, where no rank used it
                bucket.slots[0].parameter.grad = bucket.sparse_sum()
        for index in report.late:
            carrier.second_round(self.buckets[index])
        factor = self.weighting.settle(report, divisor=self.divisor, averages_over_all=carrier.hook is not None)
        if factor != 1.0:
            rescale(self.buckets, factor)
        unused = stats.unused = hand_out(layout, self.options.placement, report.used)
        self._learn()
        stats.steps += 1
        stats.waited_s += waited_s
        stats.times.finalized_ns = time.perf_counter_ns()
        stats.used_by = report.used
        self.mode = None
        if self.weighting.mine.given:
            self.weighting.mine.clear()
        self._passes.forget()
        for bucket in self.buckets:
            bucket.work, bucket.finished = None, bucket.work
        if events.listeners:
            events.emit(events.StepFinalized(self.name, stats.steps, waited_s, unused))
        return report

    def _wait_for(self, works: list[Work]) -> float:
        began = time.perf_counter()
        for bucket in self.buckets if events.listeners else ():
            start = time.perf_counter()
            if bucket.work is not None:
                bucket.work.wait()
            events.emit(events.BucketReduced(self.name, self.step, bucket.index, time.perf_counter() - start))
        for work in works:
            work.wait()
        for bucket in self.buckets:
            bucket.advance(BucketState.REDUCED)
        return time.perf_counter() - began

    def _learn(self) -> None:
        """Expect next time what came this time; and agree, once, on the order in which gradients arrive."""
        shadows = self.weighting.shadows is not None
        for slot in self.slots if self._intake.irregular and not shadows else ():
            slot.dirty = False
            slot.stale = None
            if slot.seen != slot.expected:
                if self._learnt and (slot.seen == 0) != (slot.expected == 0):
                    self.stats.graph_is_static = False
                slot.expected = slot.seen
        self._intake.irregular = False
        self._learnt = self._learnt or not shadows
        self.arrivals.learn(from_this_step=not shadows)
        if self.planner.arrivals is not None:
            self.planner.agree_on_order()
