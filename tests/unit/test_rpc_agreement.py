"""Whether ranks are at the same pass, decided from what each says of itself; and whose turn it is to send."""

from __future__ import annotations

import threading

import pytest

from phalanx.compose.rpc.agreement import Phase, Row, Status, Verdict, judge
from phalanx.compose.rpc.floor import Floor
from phalanx.errors import CollectiveTimeoutError


def row(context: int, *, own: bool = True, place: int = 0, forward: bool = False, status: Status = Status.OK) -> Row:
    return Row(context, own, place, Phase.FORWARD if forward else Phase.BACKWARD, status)


def test_numbers_are_read_as_they_were_written() -> None:
    mine = row(7 << 48, own=False, place=2, forward=True, status=Status.OUT)
    assert Row.of(mine.numbers()) == mine


def test_contexts_of_each_rank_pair_by_their_place() -> None:
    assert judge([row(1), row(2), row(3)]) == Verdict()
    verdict = judge([row(1), row(2, place=1)])
    assert verdict.is_final and "rank 0 at number 1 of its open ones, rank 1 at number 2" in verdict.problem


def test_contexts_of_a_master_pair_by_their_id() -> None:
    assert judge([row(5), row(5, own=False, place=3)]) == Verdict()
    assert judge([row(9), row(4, own=False)]) == Verdict(first=4)


def test_a_rank_that_has_run_out_is_at_any_pass() -> None:
    assert judge([row(5, own=False), row(-1, status=Status.OUT)]) == Verdict()
    assert judge([row(-1, status=Status.OUT)]) == Verdict()


def test_a_failure_drops_the_pass_and_the_ranks_stay_together() -> None:
    verdict = judge([row(1), row(2, status=Status.RAISED), row(3, status=Status.MISSING)])
    assert verdict.failed == (1,) and "rank 1 raised" in verdict.problem and not verdict.is_final
    # Unless it was another pass that failed: the others do not know which of theirs it is paired with.
    assert judge([row(9), row(4, own=False, status=Status.RAISED)]).is_final


def test_forward_against_backward() -> None:
    verdict = judge([row(1, forward=True), row(2)])
    assert verdict.is_final and "rank 0 is at a forward pass, rank 1 is at a backward pass" in verdict.problem


def test_the_floor_is_held_by_one_pass() -> None:
    floor = Floor()
    assert floor.try_take(1) and floor.try_take(1)
    assert not floor.try_take(2)
    floor.release(2)  # not the holder's: nothing happens
    assert not floor.try_take(2)
    floor.release(1)
    assert floor.try_take(2)


def test_a_promised_floor_is_for_that_pass_alone() -> None:
    floor = Floor()
    floor.take(1, timeout_s=1)
    floor.release(1, promise=2)
    assert not floor.try_take(1)
    with pytest.raises(CollectiveTimeoutError, match="another rank is at the pass of context 2"):
        floor.take(1, timeout_s=0)
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (floor.take(1, timeout_s=10), taken.set()))
    waiting.start()
    assert floor.try_take(2) and not taken.is_set()
    floor.release(2)
    waiting.join()
    assert taken.is_set()
