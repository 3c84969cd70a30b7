"""Which bucket may leave now: the same sequence on every rank, whatever becomes ready first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.reducer.order import LaunchOrder


@given(st.integers(1, 10).flatmap(lambda n: st.permutations(range(n))))
def test_never_one_before_its_predecessor_and_the_last_when_backward_is_over(ready: list[int]) -> None:
    order = LaunchOrder(len(ready))
    order.reset()
    launched: list[int] = []
    for number, bucket in enumerate(ready):
        order.mark_ready(bucket)
        launched += order.launchable()
        done = set(ready[: number + 1])
        expected = next((i for i in range(len(ready)) if i not in done), len(ready))
        assert launched == list(range(min(expected, len(ready) - 1)))
    assert order.all_ready
    assert not order.all_launched
    launched += order.launchable(backward_is_over=True)
    assert launched == list(range(len(ready)))
    assert order.all_launched


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_what_is_ready_from_the_start_still_waits_for_its_turn(ready: list[bool]) -> None:
    order = LaunchOrder(len(ready))
    order.reset(ready)
    first_missing = ready.index(False) if False in ready else len(ready)
    assert list(order.launchable(backward_is_over=True)) == list(range(first_missing))
    assert list(order.launchable(backward_is_over=True)) == []  # each once
    order.reset()
    assert list(order.launchable(backward_is_over=True)) == []


def test_no_buckets_are_all_launched() -> None:
    assert LaunchOrder(0).all_launched
