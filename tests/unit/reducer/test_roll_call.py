"""Runs and the roll call, without autograd: parameters get gradients by hand, and `tick` is called as a hook would."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.reducer import runs
from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.layout import Layout
from phalanx.reducer.plan import BucketPolicy
from phalanx.reducer.roll_call import RollCall
from phalanx.reducer.runs import Run, plan_runs


class Alone:
    """The little of a group that laying out buckets needs."""

    rank, size = 0, 1

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
    assert run.large == [1] and run.small == [0, 2, 3]
    assert [piece.numel() for piece, _ in run.pieces] == [4, 8]


# -- the roll call -----------------------------------------------------------------------------------------------------


@dataclass
class Roll:
    """A roll call over all but the first of some parameters, two to a run, and what it has called."""

    count: int = 7
    taken: list[list[str]] = field(default_factory=list)
    losses: int = 0
    keeps: bool = False

    def __post_init__(self) -> None:
        self.layout, self.parameters = laid_out([8] * self.count, bucket_bytes=64)
        slots = self.layout.slots  # the first bucket holds the first and one more
        self.call = RollCall(slots[0], slots[1:], take=self._take, lost=self._lose)
        self.call.lay_out()

    def _take(self, run: Run, gradients: list[torch.Tensor]) -> None:
        assert all(gradient is not None for gradient in gradients)
        self.taken.append(names(run.slots))
        for slot in run.slots:
            slot.parameter.grad = None

    def _lose(self) -> None:
        self.losses += 1

    def arrives(self, *indices: int) -> None:
        for index in indices:
            parameter = self.parameters[index]
            with torch.no_grad():
                if parameter.grad is None:
                    parameter.grad = torch.ones_like(parameter)
                else:
                    parameter.grad += 1
            self.call.tick(parameter)


def test_an_order_that_is_kept() -> None:
    roll = Roll()
    for _ in range(3):
        roll.taken.clear()
        roll.call.begin()
        assert roll.call.is_open and not roll.call.complete
        roll.arrives(1, 2, 3, 4, 5, 6)
        assert roll.taken == [["p1"], ["p2", "p3"], ["p4", "p5"], ["p6"]]
        assert roll.call.complete
        roll.call.stand_by()
        assert not roll.call.is_open
    assert roll.losses == 0


def test_within_a_run_the_order_is_of_no_account() -> None:
    roll = Roll()
    roll.call.begin()
    roll.arrives(1, 3, 2, 5, 4, 6)
    assert roll.call.complete and roll.losses == 0


def test_an_order_that_has_changed() -> None:
    roll = Roll()
    roll.call.begin()
    roll.arrives(1, 2, 4)  # instead of 3
    assert roll.losses == 1
    rest = roll.call.finish()
    assert names(rest.taken) == ["p1"]
    assert names(rest.arrived) == ["p2", "p4"]
    assert names(rest.absent) == ["p3", "p5", "p6"]
    assert rest.repeats == 0
    assert not roll.call.is_open


def test_too_few() -> None:
    roll = Roll()
    roll.call.begin()
    roll.arrives(1, 2, 3, 4)
    assert roll.losses == 0 and not roll.call.complete
    rest = roll.call.finish()
    assert (names(rest.taken), names(rest.arrived), names(rest.absent)) == (["p1", "p2", "p3"], ["p4"], ["p5", "p6"])
    assert rest.repeats == 0


def test_none_at_all() -> None:
    roll = Roll()
    roll.call.begin()
    rest = roll.call.finish()
    assert not rest.taken and not rest.arrived and len(rest.absent) == 6 and rest.repeats == 0


def test_too_many() -> None:
    roll = Roll()
    roll.call.begin()
    roll.arrives(1, 2, 3, 4, 5, 6, 2)
    assert roll.losses == 1 and not roll.call.complete
    rest = roll.call.finish()
    assert len(rest.taken) == 6 and not rest.arrived and rest.repeats == 1


def test_one_again_in_anothers_place() -> None:
    roll = Roll()
    roll.call.begin()
    roll.arrives(1, 2, 3, 2, 4)
    assert roll.losses == 1  # the run of 4 and 5 had two arrivals, and 5 was none of them
    rest = roll.call.finish()
    assert names(rest.taken) == ["p1", "p2", "p3"] and names(rest.arrived) == ["p4"] and rest.repeats == 1


def test_one_twice_before_its_run_is_complete() -> None:
    roll = Roll()
    roll.call.begin()
    roll.arrives(1, 2, 2)
    assert roll.losses == 1
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p2"] and rest.repeats == 1


def test_gradients_that_were_kept_are_not_taken_for_new_ones() -> None:
    roll = Roll()
    for parameter in roll.parameters[1:]:
        parameter.grad = torch.full_like(parameter, 5.0)
    roll.call.begin()
    roll.arrives(1, 2, 4)
    assert roll.losses == 1
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p2", "p4"] and names(rest.absent) == ["p3", "p5", "p6"] and rest.repeats == 0


def test_kept_gradients_that_were_added_to_have_come() -> None:
    roll = Roll()
    for parameter in roll.parameters[1:5]:
        parameter.grad = torch.full_like(parameter, 5.0)
    roll.call.begin()
    roll.arrives(1, 2, 3, 4, 5, 6)
    assert roll.call.complete and roll.losses == 0


def test_a_gradient_that_was_replaced_has_come() -> None:
    """As under create_graph, where autograd makes a new tensor of the sum."""
    roll = Roll(3)
    for parameter in roll.parameters[1:]:
        parameter.grad = torch.ones_like(parameter)
    roll.call.begin()
    for parameter in roll.parameters[1:]:
        parameter.grad = parameter.grad + 1
        roll.call.tick(parameter)
    assert roll.call.complete


def test_one_that_comes_early() -> None:
    """Before the first, whose hook would have begun the pass."""
    roll = Roll()
    roll.arrives(3)
    assert roll.losses == 1
    roll.call.begin(early=roll.parameters[3])
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p3"] and len(rest.absent) == 5 and rest.repeats == 0


def test_early_with_what_was_kept() -> None:
    roll = Roll()
    for parameter in roll.parameters:
        parameter.grad = torch.ones_like(parameter)
    roll.arrives(3)
    roll.call.begin(early=roll.parameters[3])
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p3"] and rest.repeats == 0


def test_a_pass_that_keeps_takes_nothing_in() -> None:
    roll = Roll()
    roll.call.begin(keep=True)
    roll.arrives(6, 2, 2, 1, 1, 1, 6, 6, 6, 6)  # any order, any number
    assert not roll.taken and roll.losses == 0
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p1", "p2", "p6"] and names(rest.absent) == ["p3", "p4", "p5"]
    roll.call.begin()  # and then one that takes them, added to
    roll.arrives(1, 2, 3, 4, 5, 6)
    assert roll.call.complete and roll.losses == 0


def test_a_parameter_that_is_gone_has_not_come() -> None:
    roll = Roll(4)
    roll.call.begin()
    roll.arrives(1, 2)
    del roll.parameters[3]
    rest = roll.call.finish()
    assert names(rest.arrived) == ["p2"] and names(rest.absent) == ["p3"]
    roll.call.begin()


@given(arrivals=st.lists(st.integers(1, 6), max_size=12), kept=st.sets(st.integers(1, 6)))
@settings(max_examples=150, deadline=None)
def test_what_has_come_is_known_whatever_came(arrivals: list[int], kept: set[int]) -> None:
    """Until an order is lost, and at that point: each is taken, arrived or absent as it is, and repeats are counted."""
    roll = Roll()
    for index in kept:
        roll.parameters[index].grad = torch.ones_like(roll.parameters[index])
    roll.call.begin()
    seen: list[int] = []
    for index in arrivals:
        roll.arrives(index)
        seen.append(index)
        if roll.losses:
            break
    complete = roll.call.complete
    assert complete == (sorted(seen) == [1, 2, 3, 4, 5, 6] and not roll.losses)
    rest = roll.call.finish()
    came = {f"p{index}" for index in seen}
    assert {*names(rest.taken), *names(rest.arrived)} == came
    assert set(names(rest.absent)) == {f"p{index}" for index in range(1, 7)} - came
    if roll.losses or len(seen) == len(came):
        assert rest.repeats == len(seen) - len(came)
