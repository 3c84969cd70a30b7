"""Runs and the roll call, without autograd: parameters get gradients by hand, and their hooks are called by hand."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.reducer import roll_call, runs
from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.intake import Intake
from phalanx.reducer.layout import Layout
from phalanx.reducer.options import Placement
from phalanx.reducer.plan import BucketPolicy
from phalanx.reducer.roll_call import RollCall
from phalanx.reducer.runs import Run, plan_runs
from phalanx.reducer.streams import HOME


class Alone:
    """The little of a group that laying out buckets needs."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.passes: set[object] = set()

    def waits_on_streams(self, device: torch.device) -> bool:
        return False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)


def laid_out(sizes: list[int], *, bucket_bytes: int = 64) -> tuple[Layout, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    slots = [ParameterSlot(index, f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    policy = BucketPolicy(bucket_bytes, bucket_bytes)
    order = list(range(len(slots)))
    return Layout(slots, [False] * len(slots), order, policy, Alone(), control_in_tail=False), parameters  # type: ignore[arg-type]


def names(slots: list[ParameterSlot]) -> list[str]:
    return [slot.name for slot in slots]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_end_with_their_buckets() -> None:
    layout, _ = laid_out([8, 8, 8, 8, 8])  # two to a bucket of 64 bytes
    assert [names(run.slots) for run in plan_runs(layout.slots)] == [["p0", "p1"], ["p2", "p3"], ["p4"]]


def test_a_run_ends_when_a_bucket_does_also_where_buckets_are_filled_in_turns() -> None:
    layout, _ = laid_out([8, 8, 8, 8])
    first, second, third, fourth = layout.slots
    cut = [names(run.slots) for run in plan_runs([first, third, second, fourth])]
    assert cut == [["p0", "p2", "p1"], ["p3"]]
    counts = plan_runs([first, third, second, fourth])[0].counts
    assert [(bucket.index, count) for bucket, count in counts] == [(0, 2), (1, 1)]


def test_runs_are_no_longer_than_the_cache_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_CPU", 24)
    layout, _ = laid_out([4, 4, 4, 4, 16, 4], bucket_bytes=1 << 20)
    assert [names(run.slots) for run in plan_runs(layout.slots)] == [["p0", "p1"], ["p2", "p3"], ["p4"], ["p5"]]


def on_gpu(layout: Layout, *, room: list[int]) -> None:
    """As if it were there, with so much memory free below the peak when each comes."""
    for bucket in layout.buckets:
        bucket.spec = replace(bucket.spec, device=torch.device("cuda", 0))
    for slot, free in zip(layout.slots, room, strict=True):
        slot.room = free


def test_on_a_gpu_a_run_takes_half_of_the_room_below_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_GPU", (1024, 1 << 20))
    layout, _ = laid_out([4] * 10, bucket_bytes=1 << 20)  # 512 bytes each, as they are allocated
    on_gpu(layout, room=[0] * 3 + [4096] * 7)
    cut = [len(run) for run in cut_of(layout)]
    assert cut == [2, 4, 4]  # at least 1024 bytes where there is no room, 2048 where there is


def test_on_a_gpu_a_run_grows_with_the_room_that_backward_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_GPU", (512, 1 << 20))
    layout, _ = laid_out([4] * 8, bucket_bytes=1 << 20)
    on_gpu(layout, room=[0, 0, 0, *(2048 * times for times in range(1, 6))])
    assert [len(run) for run in cut_of(layout)] == [1, 1, 6]


def test_on_a_gpu_a_run_is_cut_before_what_finds_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_GPU", (512, 1 << 20))
    layout, _ = laid_out([4] * 6, bucket_bytes=1 << 20)
    on_gpu(layout, room=[8192, 8192, 8192, 0, 8192, 8192])
    assert [len(run) for run in cut_of(layout)] == [3, 3]  # and what waits is little enough when the others come


def cut_of(layout: Layout) -> list[list[str]]:
    return [names(run.slots) for run in plan_runs(layout.slots)]


def test_runs_do_not_cross_streams() -> None:
    layout, _ = laid_out([4] * 4, bucket_bytes=1 << 20)
    for slot, stream in zip(layout.slots, (1, 1, 2, 1), strict=True):
        slot.stream = stream
    assert [names(run.slots) for run in plan_runs(layout.slots)] == [["p0", "p1"], ["p2"], ["p3"]]


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), cap=st.integers(4, 400), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_slot_is_in_one_run_and_in_order(sizes: list[int], cap: int, seed: int) -> None:
    layout, _ = laid_out(sizes, bucket_bytes=cap)
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed)).tolist()
    slots = [layout.slots[index] for index in order]
    planned = plan_runs(slots)
    assert [slot for run in planned for slot in run.slots] == slots
    assert all(run.slots for run in planned)
    for run in planned:  # a bucket's last may only be a run's last, or its bucket would leave late
        assert not any(slot is [other for other in slots if other.bucket is slot.bucket][-1] for slot in run.slots[:-1])
        assert sum(count for _, count in run.counts) == len(run.slots)
        covered = sum(piece.numel() for piece, _ in run.pieces) + sum(run.slots[i].view.numel() for i in run.large)
        assert covered == sum(slot.view.numel() for slot in run.slots)


def test_pieces_are_as_few_as_possible_and_large_ones_are_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, _ = laid_out([4, 4, 4, 4], bucket_bytes=1 << 20)
    (whole,) = plan_runs(layout.slots)
    assert [piece.numel() for piece, _ in whole.pieces] == [16]
    monkeypatch.setattr(runs, "LARGE_BYTES_CPU", 64)
    layout, _ = laid_out([4, 16, 4, 4], bucket_bytes=1 << 20)
    (run,) = plan_runs(layout.slots)
    assert run.large == [1] and [part.places for part in run.small_parts] == [[0, 2, 3]]
    assert [piece.numel() for piece, _ in run.pieces] == [4, 8]


def test_gradients_of_several_dtypes_are_copied_in_as_few_pieces_as_there_are_dtypes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes]
    slots = [ParameterSlot(index, f"p{index}", parameter) for index, parameter in enumerate(parameters)]
    policy = BucketPolicy(1 << 20, 1 << 20)
    layout = Layout(slots, [False] * 4, [0, 1, 2, 3], policy, Alone(), control_in_tail=False)  # type: ignore[arg-type]
    run, *_ = plan_runs(layout.slots)
    assert names(run.slots) == ["p0", "p1", "p2"]  # where the first bucket is full
    assert [part.places for part in run.parts] == [[0, 2], [1]]
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda views, gradients: copied.append((views, gradients)))
    intake = Intake(Placement.OWNED)
    intake.begin(layout.buckets, 1.0)
    gradients = [torch.ones_like(parameter) for parameter in parameters[:3]]
    intake.fill_run(run, parameters[:3], gradients)  # type: ignore[arg-type]
    assert [len(views) for views, _ in copied] == [2, 1]
    assert all(view.dtype == gradient.dtype for pair in copied for view, gradient in zip(*pair, strict=True))


# -- the roll call -----------------------------------------------------------------------------------------------------


@dataclass
class Roll:
    """A roll call over some parameters, two to a run, and what it has called."""

    count: int = 7
    taken: list[list[str]] = field(default_factory=list)
    losses: int = 0
    keeps: bool = False
    knows: bool = True
    goes_on: bool = False
    relays: bool = False
    bucket_bytes: int = 64

    def __post_init__(self) -> None:
        self.layout, self.parameters = laid_out([8] * self.count, bucket_bytes=self.bucket_bytes)
        self.call = RollCall(self.layout.slots, first=self._begin, take=self._take, lost=self._lose)
        self.call.lay_out()
        self.hooks = [hook for _, hook in self.call.hooks()]
        self.begun_by: list[torch.Tensor] = []

    def _begin(self, parameter: torch.Tensor) -> bool:
        self.begun_by.append(parameter)
        if self.goes_on and self.call.is_open:
            self.call.trust()
        elif self.knows:
            if self.relays:
                self.call.lay_out()
            self.call.begin(keep=self.keeps)
        return self.knows

    def _take(self, run: Run, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        assert [id(parameter) for parameter in parameters] == [id(slot.parameter) for slot in run.slots]
        assert [id(gradient) for gradient in gradients] == [id(slot.parameter.grad) for slot in run.slots]
        self.taken.append(names(run.slots))
        for slot in run.slots:
            slot.parameter.grad = None

    def _lose(self) -> None:
        self.losses += 1

    def gets(self, index: int) -> nn.Parameter:
        parameter = self.parameters[index]
        with torch.no_grad():
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
            else:
                parameter.grad += 1
        return parameter

    def arrives(self, *indices: int) -> None:
        for index in indices:
            self.hooks[index](self.gets(index))


def test_an_order_that_is_kept() -> None:
    roll = Roll()
    for _ in range(3):
        roll.taken.clear()
        roll.arrives(0)
        assert roll.call.is_open and not roll.call.complete
        roll.arrives(1, 2, 3, 4, 5, 6)
        assert roll.taken == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"], ["p6"]]
        assert roll.call.complete
        roll.call.stand_by()
        assert not roll.call.is_open
    assert roll.losses == 0 and [id(one) for one in roll.begun_by] == [id(roll.parameters[0])] * 3


def test_within_a_run_the_order_is_of_no_account_but_for_its_last() -> None:
    roll = Roll(6, bucket_bytes=96)  # three to a run
    roll.arrives(1, 0, 2, 4, 3, 5)
    assert roll.taken == [["p0", "p1", "p2"], ["p3", "p4", "p5"]]
    assert roll.call.complete and roll.losses == 0
    roll.call.stand_by()
    roll.arrives(0, 2)
    assert roll.losses == 1


def test_a_pass_may_be_in_another_stream_than_those_before_and_its_branches_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(stream=1)
    for module in (roll_call, runs):
        monkeypatch.setattr(module, "current_stream", lambda device: now.stream)
    roll = Roll()
    on_gpu(roll.layout, room=[0] * 7)
    for slot, stream in zip(roll.layout.slots, (HOME, HOME, 5, 5, HOME, HOME, HOME), strict=True):
        slot.stream = stream
    roll.call.lay_out()
    roll.hooks = [hook for _, hook in roll.call.hooks()]

    def a_pass(home: int, branch: int) -> bool:
        roll.losses = 0
        for indices, stream in (((0, 1), home), ((2, 3), branch), ((4, 5, 6), home)):
            now.stream = stream
            roll.arrives(*indices)
        roll.call.stand_by()
        return roll.losses == 0

    assert a_pass(1, 5) and a_pass(7, 5) and a_pass(1, 5)
    assert not a_pass(1, 6) and not a_pass(7, 7)


def test_an_order_that_has_changed() -> None:
    roll = Roll()
    roll.arrives(0, 1, 2, 4, 3)
    assert roll.losses == 1
    rest = roll.call.finish()
    assert names(rest.taken) == ["p0", "p1"]
    assert names(rest.arrived) == ["p2", "p4", "p3"]
    assert names(rest.absent) == ["p5", "p6"]
    assert not rest.again
    assert not roll.call.is_open


def test_too_few() -> None:
    roll = Roll()
    roll.arrives(0, 1, 2, 3, 4)
    assert roll.losses == 0 and not roll.call.complete
    rest = roll.call.finish()
    assert (names(rest.taken), names(rest.arrived), names(rest.absent)) == (
        ["p0", "p1", "p2", "p3"],
        ["p4"],
        ["p5", "p6"],
    )
    assert not rest.again


def test_none_but_the_first() -> None:
    roll = Roll()
    roll.arrives(0)
    rest = roll.call.finish()
    assert not rest.taken and names(rest.arrived) == ["p0"] and len(rest.absent) == 6 and not rest.again


def test_too_many() -> None:
    roll = Roll()
    roll.arrives(0, 1, 2, 3, 4, 5, 6, 2, 2)
    assert not roll.call.complete
    rest = roll.call.finish()
    assert len(rest.taken) == 7 and not rest.arrived and names(rest.again) == ["p2", "p2"]


def test_the_last_of_a_run_again() -> None:
    roll = Roll()
    roll.arrives(0, 1, 1)
    assert roll.losses == 1  # at once: it has a hook of its own
    assert names(roll.call.finish().again) == ["p1"]


def test_one_again_in_anothers_place() -> None:
    roll = Roll()
    roll.arrives(0, 1, 2, 3, 2, 5)
    assert roll.losses == 1  # the run of 4 and 5 had two arrivals, and 4 was none of them
    rest = roll.call.finish()
    assert names(rest.taken) == ["p0", "p1", "p2", "p3"] and names(rest.arrived) == ["p5"]
    assert names(rest.again) == ["p2"]


def test_one_twice_before_its_run_is_complete() -> None:
    roll = Roll()
    roll.arrives(0, 1, 2, 2, 3)
    assert roll.losses == 1
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p2", "p3"] and names(rest.again) == ["p2"]


def test_gradients_that_were_kept_are_not_taken_for_new_ones() -> None:
    roll = Roll()
    for parameter in roll.parameters:
        parameter.grad = torch.full_like(parameter, 5.0)
    roll.arrives(0, 1, 2, 5)
    assert roll.losses == 1
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p2", "p5"] and names(rest.absent) == ["p3", "p4", "p6"]


def test_kept_gradients_that_were_added_to_have_come() -> None:
    roll = Roll()
    for parameter in roll.parameters[:5]:
        parameter.grad = torch.full_like(parameter, 5.0)
    roll.arrives(0, 1, 2, 3, 4, 5, 6)
    assert roll.call.complete and roll.losses == 0


def test_one_whose_gradient_was_taken_away_is_no_run() -> None:
    roll = Roll()
    roll.arrives(0)
    roll.parameters[0].grad = None
    roll.arrives(1)
    assert roll.losses == 1 and not roll.taken
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p1"] and "p0" in names(rest.absent)


@pytest.mark.parametrize("first", [0, 1, 6])  # noted, the last of its run, and a run by itself
def test_runs_that_are_laid_out_anew_when_a_pass_begins(first: int) -> None:
    """As after a cast, or when the agreed order is applied: the hook that was called is of the runs before."""
    roll = Roll()
    roll.arrives(*range(7))
    roll.call.stand_by()
    before, roll.relays = list(roll.call._runs), True
    for run in before:
        run.taken = False
    roll.arrives(first)
    assert not any(run.taken for run in before)
    assert roll.losses == (first == 1)  # which is the last of a run, and the other has not come
    assert roll.taken[4:] == ([["p6"]] if first == 6 else [])
    assert roll.call.finish().taken == ([roll.layout.slots[6]] if first == 6 else [])


def test_another_devices_thread_notes_while_a_run_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    roll, looks = Roll(4), Run.in_order

    def meanwhile(run: Run, came: list[torch.Tensor]) -> list[torch.Tensor] | None:
        if run.slots[0].name == "p0":
            roll.arrives(2)
        return looks(run, came)

    monkeypatch.setattr(Run, "in_order", meanwhile)
    roll.arrives(0, 1)
    assert roll.taken == [["p0", "p1"]] and roll.losses == 0
    roll.arrives(3)
    assert roll.call.complete


def test_begun_by_one_that_is_not_on_the_roll() -> None:
    """What the first holds from before is then not taken for what this pass brought."""
    roll = Roll(4)
    roll.parameters[0].grad = torch.ones_like(roll.parameters[0])
    assert roll.call.begin()
    roll.arrives(1)
    assert roll.losses == 1 and not roll.begun_by
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p1"] and names(rest.absent) == ["p0", "p2", "p3"]


@pytest.mark.parametrize("early", [2, 3])  # one that is only noted, and the last of a run
def test_begun_by_another_than_the_first(early: int) -> None:
    roll = Roll()
    roll.arrives(early)
    assert [id(one) for one in roll.begun_by] == [id(roll.parameters[early])]
    assert roll.losses == (early == 3)
    rest = roll.call.finish()
    assert names(rest.arrived) == [f"p{early}"] and len(rest.absent) == 6 and not rest.again


def test_one_that_begins_a_pass_in_which_it_is_none_of_ours_any_more() -> None:
    roll = Roll()
    roll.knows = False
    roll.arrives(0, 1)
    assert not roll.taken and not roll.losses and len(roll.begun_by) == 2
    assert len(roll.call.finish().absent) == 7


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("at", [1, 2])  # the last of a run, and one that is only noted
def test_in_doubt_the_next_to_come_is_asked_for(goes_on: bool, at: int) -> None:
    roll = Roll()
    roll.arrives(*range(at))
    roll.call.doubt()
    roll.goes_on = goes_on
    roll.arrives(*range(at if goes_on else 0, 7))
    assert len(roll.begun_by) == 2 and roll.losses == 0
    assert roll.call.complete


def test_a_pass_that_keeps_takes_nothing_in() -> None:
    roll = Roll()
    roll.keeps = True
    roll.arrives(0, 6, 2, 2, 1, 1, 1, 6, 6, 6, 6)  # any order, any number
    assert not roll.taken and roll.losses == 0
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p0", "p6", "p2", "p1"] and names(rest.absent) == ["p3", "p4", "p5"]
    roll.keeps = False
    roll.arrives(0, 1, 2, 3, 4, 5, 6)  # and then one that takes them, added to
    assert roll.call.complete and roll.losses == 0


def test_a_run_that_could_not_be_taken_in() -> None:
    roll = Roll()
    roll.arrives(0, 1, 2, 3, 4)
    run = roll.call._runs[1]
    for slot in run.slots:
        slot.parameter.grad = torch.ones_like(slot.parameter)
    roll.call.put_back(run, [slot.parameter for slot in run.slots])
    rest = roll.call.finish()
    assert names(rest.taken) == ["p0", "p1"] and names(rest.arrived) == ["p2", "p3", "p4"] and not rest.again


def test_a_parameter_that_is_gone_has_not_come() -> None:
    roll = Roll(4)
    roll.arrives(0, 1, 2)
    del roll.parameters[3]
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p2"] and names(rest.absent) == ["p3"]
    roll.arrives(0)


def test_nothing_is_held_between_passes() -> None:
    """Autograd's hooks hide circles from the garbage collector: only a pass may hold a parameter."""
    roll = Roll(4)
    for _ in range(2):
        roll.arrives(0, 1, 2)
        roll.call.finish()
    gone = weakref.ref(roll.parameters.pop())
    assert gone() is None


def test_a_hook_that_somebody_has_registered_since() -> None:
    roll = Roll(4)
    for parameter in roll.parameters:  # ours
        parameter.register_post_accumulate_grad_hook(roll.call.tick)
    roll.call.lay_out()
    assert roll.call.begin()
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)  # is of no account
    assert roll.call.begin()
    roll.parameters[2].register_post_accumulate_grad_hook(lambda _: None)
    assert roll.call.begin(keep=True)  # nothing is taken in, so it sees what it would
    assert not roll.call.begin()
    assert not roll.call.begin()


@given(arrivals=st.lists(st.integers(0, 6), max_size=12), kept=st.sets(st.integers(0, 6)))
@settings(max_examples=150, deadline=None)
def test_what_has_come_is_known_whatever_came(arrivals: list[int], kept: set[int]) -> None:
    """Until an order is lost, and at that point: each is taken, arrived or absent as it is, and repeats are known."""
    roll = Roll()
    for index in kept:
        roll.parameters[index].grad = torch.ones_like(roll.parameters[index])
    seen: list[int] = []
    for index in arrivals:
        roll.arrives(index)
        seen.append(index)
        if roll.losses:
            break
    complete = roll.call.complete
    assert complete == (sorted(seen) == [0, 1, 2, 3, 4, 5, 6] and not roll.losses)
    rest = roll.call.finish()
    came = {f"p{index}" for index in seen}
    assert {*names(rest.taken), *names(rest.arrived)} == came
    assert set(names(rest.absent)) == {f"p{index}" for index in range(7)} - came
    assert Counter(names([*rest.taken, *rest.arrived, *rest.again])) == Counter(f"p{index}" for index in seen)
