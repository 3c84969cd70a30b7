"""The decision core of sampling: every sample exactly once, over any sequence of world sizes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchSampler

from phalanx.data.share import Share, Tail, epoch_order

TAILS: tuple[Tail, ...] = ("pad", "drop", "keep")


def _all_indices(length: int, start: int, world_size: int, tail: Tail, order: torch.Tensor | None) -> list[list[int]]:
    return [Share(length, start, world_size, rank, tail).indices(order).tolist() for rank in range(world_size)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 12, 101])
def test_a_whole_epoch_is_torchs(length: int, drop_last: bool, shuffle: bool) -> None:
    for world_size in (1, 2, 3, 4, 9):
        for epoch in (0, 5):
            order = epoch_order(length, seed=11, epoch=epoch, shuffle=shuffle)
            mine = _all_indices(length, 0, world_size, "drop" if drop_last else "pad", order)
            for rank in range(world_size):
                theirs = TorchSampler(range(length), world_size, rank, shuffle, 11, drop_last)  # type: ignore[arg-type]
                theirs.set_epoch(epoch)
                assert mine[rank] == list(theirs)


@st.composite
def _journeys(draw: st.DrawFn) -> tuple[int, list[tuple[int, float]], int, Tail, bool]:
    length = draw(st.integers(0, 60))
    stages = draw(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), max_size=5))
    return length, stages, draw(st.integers(1, 9)), draw(st.sampled_from(TAILS)), draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(_journeys())
def test_every_sample_once_over_any_sequence_of_worlds(
    journey: tuple[int, list[tuple[int, float]], int, Tail, bool],
) -> None:
    length, stages, last_world, tail, shuffle = journey
    order = epoch_order(length, seed=1, epoch=2, shuffle=shuffle)
    whole = list(range(length)) if order is None else order.tolist()
    position, used = 0, []
    for world_size, fraction in stages:
        shares = [Share(length, position, world_size, rank, tail) for rank in range(world_size)]
        # Ranks use alike many, and no rank more than it has: before the end, as training is interrupted.
        num_used = min(int(fraction * share.count) for share in shares)
        if num_used == shares[0].count:
            num_used = max(0, num_used - 1)
        for share in shares:
            used += share.indices(order).tolist()[:num_used]
        positions = {share.position_after(num_used) for share in shares}
        assert len(positions) == 1, "ranks disagree about where the epoch stands"
        position = positions.pop()
        assert sorted(used) == sorted(whole[:position]), "what is used is not the beginning of the order"
    shares = [Share(length, position, last_world, rank, tail) for rank in range(last_world)]
    for share in shares:
        assert len(share.indices(order)) == share.count
        used += share.indices(order).tolist()
    assert shares[0].position_after(shares[0].count) == length or tail == "drop"
    count = Counter(used)
    missed = [index for index in whole if count[index] == 0]
    repeats = sum(count.values()) - len(count)
    if tail == "pad":
        assert not missed and repeats < last_world
        assert repeats == -(length - position) % last_world
    elif tail == "drop":
        assert repeats == 0 and len(missed) == (length - position) % last_world
        assert missed == whole[length - len(missed) :]
    else:
        assert not missed and repeats == 0


def test_padding_comes_from_the_beginning_and_at_the_very_end_only() -> None:
    # Of 10 samples 4 were used by a world of two; five ranks share the other 6, and four of them repeat one.
    assert _all_indices(10, 4, 5, "pad", None) == [[4, 9], [5, 0], [6, 1], [7, 2], [8, 3]]
    assert _all_indices(10, 4, 5, "keep", None) == [[4, 9], [5], [6], [7], [8]]
    assert _all_indices(10, 4, 5, "drop", None) == [[4], [5], [6], [7], [8]]


def test_more_ranks_than_samples() -> None:
    assert _all_indices(2, 0, 5, "pad", None) == [[0], [1], [0], [1], [0]]
    assert _all_indices(2, 0, 5, "keep", None) == [[0], [1], [], [], []]
    assert _all_indices(2, 0, 5, "drop", None) == [[]] * 5
    assert _all_indices(2, 2, 3, "pad", None) == [[]] * 3


def test_an_order_is_not_a_list_of_python_integers() -> None:
    share = Share(100_000, 0, 2, 1, "pad")
    order = epoch_order(100_000, seed=0, epoch=0, shuffle=True)
    assert max(len(part) for part in share.parts(order, most=1000)) == 1000
    assert list(share.parts(None, most=1000)) == [range(1, 100_000, 2)]
