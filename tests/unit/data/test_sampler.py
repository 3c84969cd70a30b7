"""`DistributedSampler` without processes: epochs, states, and mistakes."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as TorchSampler

from phalanx import DistributedSampler


def make(length: int = 10, world_size: int = 2, rank: int = 0, **options: Any) -> DistributedSampler:
    return DistributedSampler(range(length), world_size, rank, **options)  # type: ignore[arg-type]


def theirs(length: int, world_size: int, rank: int, epoch: int, **options: Any) -> list[int]:
    sampler: TorchSampler[int] = TorchSampler(range(length), world_size, rank, **options)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def test_it_is_torchs() -> None:
    sampler = make(drop_last=True)
    assert isinstance(sampler, TorchSampler)
    assert (len(sampler), sampler.num_samples, sampler.total_size, sampler.epoch) == (5, 5, 10, 0)


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"seed": 7}, {"drop_last": True}], ids=str)
def test_each_iteration_is_the_next_epoch(options: dict[str, Any]) -> None:
    sampler = make(11, 3, 1, **options)
    for epoch in range(4):
        assert list(sampler) == theirs(11, 3, 1, epoch, **options)
        assert sampler.epoch == epoch


def test_an_iteration_counts_from_its_first_draw() -> None:
    sampler = make(12)
    for _ in range(5):
        iter(sampler)  # made and dropped
    assert next(iter(sampler)) == theirs(12, 2, 0, 0)[0]
    assert sampler.epoch == 0
    assert list(sampler) == theirs(12, 2, 0, 1), "an iteration that was left counts too"


def test_an_empty_iteration_counts() -> None:
    sampler = make(1, 4, 0, drop_last=True)
    assert list(sampler) == [] and list(sampler) == []
    assert sampler.epoch == 1


def test_who_sets_the_epoch_has_torchs_behaviour() -> None:
    ours, torchs = make(12), TorchSampler(range(12), 2, 0)  # type: ignore[arg-type]
    list(ours)
    for epoch in (3, 3, 0, 8):
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs) and list(ours) == list(torchs), "advances by set_epoch alone"
        assert ours.epoch == epoch
    early = iter(ours), iter(torchs)
    ours.epoch = torchs.epoch = 2
    assert list(early[0]) == list(early[1]) == theirs(12, 2, 0, 8), "an iterator keeps the epoch it was made in"
    assert list(ours) == list(torchs) == theirs(12, 2, 0, 2)


def test_two_iterators_at_once_are_two_epochs() -> None:
    sampler = make(12)
    pairs = list(zip(sampler, sampler, strict=True))
    assert [a for a, _ in pairs] == theirs(12, 2, 0, 0) and [b for _, b in pairs] == theirs(12, 2, 0, 1)


def _resumed(states: dict[str, Any], world_size: int, **options: Any) -> list[DistributedSampler]:
    samplers = [make(23, world_size, rank, **options) for rank in range(world_size)]
    for sampler in samplers:
        sampler.load_state_dict(states)
    return samplers


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=12),
    st.sampled_from([{}, {"drop_last": True}, {"pad": False}, {"shuffle": False}]),
)
def test_epochs_are_whole_whatever_the_worlds(stages: Sequence[tuple[int, int]], options: dict[str, Any]) -> None:
    """Restart again and again, with another number of ranks and so many draws each, and look at whole epochs."""
    state = make(23, 1, 0, **options).state_dict()
    used: dict[int, list[int]] = {}
    last_drew: dict[int, int] = {}  # the world that drew last, and may have padded
    last_tried: dict[int, int] = {}  # the world that tried to last, and may have dropped what was too few for it
    for world_size, num_draws in stages:
        samplers = _resumed(state, world_size, **options)
        for sampler in samplers:
            drawn = list(itertools.islice(sampler, num_draws))
            used.setdefault(sampler.epoch, []).extend(drawn)
            if num_draws:
                last_tried[sampler.epoch] = world_size
            if drawn:
                last_drew[sampler.epoch] = world_size
        state = samplers[0].state_dict()
    last_epoch = max(used)
    for epoch, indices in used.items():
        repeats = len(indices) - len(set(indices))
        assert repeats <= (last_drew.get(epoch, 1) - 1 if not options or "shuffle" in options else 0)
        if epoch < last_epoch:
            missed = 23 - len(set(indices))
            ended_by = max(last_drew.get(epoch, 1), last_tried.get(epoch, 1))
            assert missed <= (ended_by - 1 if "drop_last" in options else 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_resume_is_the_uninterrupted_iteration(world_size: int) -> None:
    for num_draws in range(7):
        whole = list(make(23, world_size, 0))
        sampler = make(23, world_size, 0)
        first = list(itertools.islice(sampler, num_draws))
        resumed = make(23, world_size, 0)
        resumed.load_state_dict(pickle.loads(pickle.dumps(sampler.state_dict())))
        assert first + list(resumed) == whole
        assert list(resumed) == theirs(23, world_size, 0, 1), "the iteration after it is the next epoch"


def test_resume_draws_nothing_again() -> None:
    """In a dataset of a billion samples, at its end: replaying would take minutes."""
    sampler = make(10**9, 4, 3, shuffle=False)
    state = {**sampler.state_dict(), "position": 10**9 - 8}
    sampler.load_state_dict(state)
    assert list(sampler) == [10**9 - 5, 10**9 - 1]


def test_all_ranks_have_one_state() -> None:
    samplers = [make(23, 4, rank) for rank in range(4)]
    for sampler in samplers:
        list(itertools.islice(sampler, 3))
    assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)


def test_an_iteration_that_is_over_leads_to_the_next_epoch() -> None:
    sampler, resumed = make(), make()
    list(sampler)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.epoch == 1
    assert resumed.state_dict() == sampler.state_dict()
    assert list(resumed) == theirs(10, 2, 0, 1)


def test_all_drawn_but_not_over_has_an_empty_rest() -> None:
    sampler, resumed = make(), make()
    list(itertools.islice(sampler, 5))  # the last batch is in hand, and the loop will ask once more
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.epoch == 0
    assert list(resumed) == []
    assert list(resumed) == theirs(10, 2, 0, 1)


def test_setting_the_loaded_epoch_keeps_the_place_and_another_drops_it() -> None:
    sampler = make()
    list(itertools.islice(sampler, 2))
    state = sampler.state_dict()
    same, other, over = make(), make(), make()
    same.load_state_dict(state)
    same.set_epoch(0)
    assert list(same) == theirs(10, 2, 0, 0)[2:]
    assert list(same) == theirs(10, 2, 0, 0), "the place is for one iteration"
    other.load_state_dict(state)
    other.set_epoch(4)
    assert list(other) == theirs(10, 2, 0, 4)
    list(sampler)
    over.load_state_dict(sampler.state_dict())
    over.set_epoch(1)
    assert list(over) == [], "nothing is left of an epoch that is over"


def test_what_is_used_can_be_told_apart_from_what_is_drawn() -> None:
    sampler, resumed = make(40), make(40)
    drawn = iter(sampler)
    list(itertools.islice(drawn, 12))  # a loader fetches ahead
    sampler.advance(2)
    sampler.advance(2)
    assert sampler.state_dict()["position"] == 8
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == theirs(40, 2, 0, 0)[4:]
    sampler.advance(1000)
    list(drawn)
    assert sampler.state_dict()["position"] == 40 and sampler.state_dict()["ended"]


def test_unpadded_ranks_have_unequal_counts() -> None:
    samplers = [make(10, 4, rank, shuffle=False, pad=False) for rank in range(4)]
    assert [list(sampler) for sampler in samplers] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert [len(sampler) for sampler in samplers] == [3, 3, 2, 2]
    assert {sampler.total_size for sampler in samplers} == {10}
    assert [list(make(2, 3, rank, shuffle=False, pad=False)) for rank in range(3)] == [[0], [1], []]


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"length": 11}, "dataset length: the sampler has 10, the state 11"),
        ({"seed": 1}, "seed: the sampler has 0, the state 1"),
        ({"shuffle": False}, "shuffle: the sampler has True, the state False"),
        ({"drop_last": True}, "drop_last: the sampler has False, the state True"),
        ({"pad": False}, "pad: the sampler has True, the state False"),
        ({"position": 11}, "between 0 and the dataset length 10, the state has 11"),
        ({"position": -1}, "the state has -1"),
        ({"position": "half"}, "position must be an integer, the state has 'half'"),
        ({"epoch": 1.5}, "epoch must be an integer, the state has 1.5"),
    ],
)
def test_a_state_of_another_order_is_refused(change: dict[str, Any], expected: str) -> None:
    sampler = make()
    before = sampler.state_dict()
    with pytest.raises(ValueError, match=expected):
        sampler.load_state_dict({**before, **change})
    assert sampler.state_dict() == before


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(
        ValueError, match="lacks length, seed, shuffle, drop_last, pad, epoch, position, ended; it has yielded"
    ):
        make().load_state_dict({"yielded": 3})
    with pytest.raises(TypeError, match="got list"):
        make().load_state_dict([])  # type: ignore[arg-type]


def test_a_state_may_come_back_as_tensors() -> None:
    sampler = make()
    state = {name: torch.tensor(value) for name, value in {**sampler.state_dict(), "position": 4}.items()}
    sampler.load_state_dict(state)
    assert list(sampler) == theirs(10, 2, 0, 0)[2:]


def test_mistakes() -> None:
    with pytest.raises(ValueError, match=r"Invalid rank 2, rank should be in the interval \[0, 1\]"):
        make(10, 2, 2)
    with pytest.raises(ValueError, match="choose one"):
        make(drop_last=True, pad=False)
    with pytest.raises(ValueError, match="no iteration is under way"):
        make().advance(1)
    with pytest.raises(ValueError, match="not been iterated"):
        make().indices()
    sampler = make()
    next(iter(sampler))
    with pytest.raises(ValueError, match="negative, got -1"):
        sampler.advance(-1)
    drawn: Any = iter(sampler)
    next(drawn)
    with pytest.raises(ValueError, match="has been drawn from"):
        drawn.load_state_dict(sampler.state_dict())


def test_a_dataset_that_changed_is_noticed() -> None:
    data = list(range(10))
    sampler = DistributedSampler(data, 2, 0)  # type: ignore[arg-type]
    data.append(10)
    with pytest.raises(ValueError, match="had 10 samples when the sampler was made and has 11 now"):
        list(sampler)


def test_a_copy_goes_its_own_way() -> None:
    sampler = make(12)
    list(itertools.islice(sampler, 2))
    twin = copy.deepcopy(sampler)
    assert list(twin) == theirs(12, 2, 0, 1)
    assert sampler.state_dict()["epoch"] == 0 and sampler.state_dict()["position"] == 4
