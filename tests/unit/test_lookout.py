"""Who looks around while the host waits within CUDA: on made-up groups."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace

import pytest
import torch

from phalanx.comm import lookout
from phalanx.comm.lookout import Lookout, Mark, OwnMark
from phalanx.errors import PeerFailedError, PeerLostError, PhalanxError


class Step:
    def __init__(self, *topics: str, over: bool = False) -> None:
        self.queued_topics = topics
        self.over = over
        self.turn = 1

    def is_over(self) -> bool:
        return self.over


class Group:
    """One whose board says what a test says."""

    rank, name = 0, "made up"

    def __init__(self, *steps: Step, says: Callable[[Collection[str]], None] = lambda also: None) -> None:
        self.steps = list(steps)
        self.says = says
        self.num_looks = 0
        self.num_others = 0
        self.gone: set[int] = set()
        self.cause: PhalanxError | None = None
        self.is_closed = False
        self.given_up = threading.Event()

    def queued(self) -> list[Step]:
        return self.steps

    @property
    def is_given_up(self) -> bool:
        return self.cause is not None

    def check_notices(self, also: Collection[str] = ()) -> None:
        self.num_looks += 1
        self.says(also)

    def is_beyond_doubt(self, error: PhalanxError) -> bool:
        return isinstance(error, PeerLostError) and set(error.lost_ranks) <= self.gone

    def give_up(self, cause: PhalanxError) -> None:
        assert self.cause is None, "given up twice"
        self.cause = cause
        self.given_up.set()

    def give_up_others(self) -> None:
        self.num_others += 1


def lost(also: Collection[str]) -> None:
    raise PeerLostError("rank 1 left", lost_ranks=[1])


def watching(*groups: Group) -> Lookout:
    """One that looks when a test says so."""
    found = Lookout()
    for group in groups:
        found._groups.add(group)
    return found


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(lookout, "GRACE_S", 0.05)
    monkeypatch.setattr(lookout, "GOES_ON_WITHIN_S", 0.05)


def look_on(looks: Lookout, *, until: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not until() and time.monotonic() < deadline:
        looks.look()
    assert until()


def test_what_is_over_needs_no_look_at_the_others() -> None:
    group = Group(Step(over=True), Step(over=True), says=lost)
    watching(group).look()
    assert not group.num_looks and group.cause is None


def test_what_takes_long_is_waited_for_as_long_as_nobody_is_missing() -> None:
    group = Group(Step(over=True), Step())
    looks = watching(group)
    look_on(looks, until=lambda: group.num_looks == 100)
    assert group.cause is None


def test_a_rank_that_left_may_have_sent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(lookout, "time", SimpleNamespace(monotonic=lambda: clock.now))
    group = Group(Step(), says=lost)
    looks = watching(group)
    looks.look()
    assert group.cause is None
    group.steps[0].over = True
    looks.look()
    clock.now = 0.06  # the time that a later one is given does not count from the beginning
    group.steps[0].over = False
    looks.look()
    clock.now = 0.1
    looks.look()
    assert group.cause is None
    clock.now = 0.12
    looks.look()
    assert group.cause is not None


def test_the_first_cause_is_the_one_that_counts() -> None:
    causes = iter([PeerFailedError("a hook raised", failed_ranks=[1])])

    def say(also: Collection[str]) -> None:
        raise next(causes, PeerLostError("and rank 1 left", lost_ranks=[1]))

    group = Group(Step(), says=say)
    look_on(watching(group), until=lambda: group.cause is not None)
    assert "a hook raised" in str(group.cause)


def test_the_dead_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "GRACE_S", 1000.0)
    group = Group(Step(), says=lost)
    group.gone = {1}
    looks = watching(group)
    looks.look()
    assert group.cause is None  # it may have been over a moment later
    looks.look()
    assert isinstance(group.cause, PeerLostError)


def test_one_step_after_the_other_is_over_though_never_when_somebody_looks() -> None:
    group = Group(Step(), says=lost)
    looks = watching(group)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        group.steps[0].turn += 1
        looks.look()
    assert group.cause is None
    look_on(looks, until=lambda: group.cause is not None)


def given_up() -> tuple[Group, Lookout]:
    """A group whose peer is dead, and who has found it out."""
    group = Group(Step(), says=lost)
    group.gone = {1}
    looks = watching(group)
    look_on(looks, until=lambda: group.cause is not None)
    return group, looks


def test_a_device_that_goes_on_is_let_be() -> None:
    group, looks = given_up()
    group.steps[0].over = True
    look_on(looks, until=lambda: not looks._groups)
    assert not group.num_others


def test_a_device_that_waits_on_waits_for_what_was_sent_on_another_group() -> None:
    group, looks = given_up()
    assert not group.num_others
    look_on(looks, until=lambda: not looks._groups)
    looks.look()
    assert group.num_others == 1


def test_what_others_failed_in_is_known_by_its_topic() -> None:
    asked: list[set[str]] = []
    over = Step("that all ranks failed in, and went on", over=True)
    group = Group(Step("step 3", "step 4"), over, Step("another"), says=lambda also: asked.append(set(also)))
    watching(group).look()
    assert asked == [{"step 3", "step 4", "another"}]


def test_trouble_with_one_group_keeps_it_from_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def break_down(also: Collection[str]) -> None:
        raise OSError("the store is gone")

    groups = [Group(Step(), says=break_down), Group(Step(), says=lost), Group(Step(), says=break_down)]
    for group in groups:
        group.gone = {1}
    looks = watching(*groups)
    with caplog.at_level(logging.DEBUG):
        looks.look()
        looks.look()
    assert [group.cause is None for group in groups] == [True, False, True]
    assert "could not look after group made up: the store is gone" in caplog.text


def test_the_thread_runs_while_there_are_groups() -> None:
    looks, group, closed = Lookout(), Group(Step(), says=lost), Group(Step())
    looks.watch(closed)
    looks.watch(group)
    thread = looks._thread
    assert thread is not None and thread.is_alive()
    assert group.given_up.wait(10)
    assert thread.is_alive()
    closed.is_closed = True
    thread.join(10)
    assert not thread.is_alive()
    another = Group(Step(), says=lost)
    looks.watch(another)
    assert another.given_up.wait(10)
    looks.end()
    assert not any(other.name == "phalanx-lookout" for other in threading.enumerate())
    looks.watch(Group(Step()))  # at exit: no more
    assert looks._thread is None or not looks._thread.is_alive()


def test_a_group_that_nobody_holds_any_more_is_let_go() -> None:
    looks = Lookout()
    looks.watch(Group(Step(over=True)))
    thread = looks._thread
    if thread is not None:
        thread.join(10)
    assert looks._thread is None


def test_a_fork_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = Lookout()
    monkeypatch.setattr(lookout, "_lookout", parents)
    monkeypatch.setattr(lookout, "_of_process", os.getpid() + 1)
    group = Group(Step(), says=lost)
    lookout.watch(group)
    try:
        assert group.given_up.wait(10)
        assert parents._thread is None
    finally:
        lookout._lookout.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mark_is_over_when_its_last_number_has_come(dtype: torch.dtype) -> None:
    numbers = torch.zeros(3, dtype=dtype)
    mark = Mark(numbers)
    mark.clear()
    assert not mark.is_over() and bool(numbers.isnan().all())
    numbers[:2] = 1.0
    assert not mark.is_over()
    numbers.copy_(torch.tensor([0.0, 0.0, 7.0]))
    assert mark.is_over()


def test_a_mark_of_its_own() -> None:
    mark = OwnMark(torch.device("cpu"))
    assert mark.is_over()  # nothing was queued
    mark.clear()
    assert not mark.is_over()
    mark.queue({"step 3"})
    assert mark.is_over() and mark.queued_topics == {"step 3"}


def test_a_mark_that_is_still_to_come_is_not_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number would come for the first time that it was queued, and seem to have come for the last."""
    made: list[OwnMark] = []
    marks = lookout.Marks(torch.device("cpu"), made.append)
    marks.queue({"one"})
    marks.queue({"two"})
    assert len(made) == 1 and made[0].turn == 2  # the CPU comes to it at once
    made[0].clear()
    for number in range(2 * lookout.MOST_MARKS):
        marks.queue({f"{number}"})
        made[-1].clear()
    assert len(made) == lookout.MOST_MARKS and made[0].queued_topics == {"two"}


def test_a_mark_that_is_made_in_inference_is_used_outside_of_it() -> None:
    with torch.inference_mode():
        mark = OwnMark(torch.device("cpu"))
        mark.queue(())
    mark.queue(())
    assert mark.is_over()
