"""`DistributedSampler` in real ranks and under real loaders: no sample is lost or repeated, however often the job restarts.

Each stage of a journey is a job of its own, with another number of ranks, that begins from the state which rank 0 of the
one before saved after its last batch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data import DistributedSampler as TorchSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import phalanx as px
from phalanx.testing import run_ranks

LENGTH, BATCH_SIZE = 47, 3


def _torchs(world_size: int, rank: int, epoch: int) -> list[int]:
    sampler: TorchSampler[int] = TorchSampler(range(LENGTH), world_size, rank)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


ORDER = _torchs(1, 0, 0)


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_are_torchs_by_default(world_size: int, backend: str) -> None:
    shares = run_ranks(_shares, world_size, backend=backend)
    assert shares == [_torchs(world_size, rank, 0) for rank in range(world_size)]


def _shares() -> list[int]:
    return list(px.DistributedSampler(range(LENGTH)))  # type: ignore[arg-type]


def _tracked(state: Any, num_workers: int, num_batches: int | None, options: dict[str, Any]) -> tuple[list[int], Any]:
    """A plain DataLoader: its workers fetch ahead of what is used, and `track` counts what is used."""
    sampler = px.DistributedSampler(range(LENGTH), **options)  # type: ignore[arg-type]
    if state is not None:
        sampler.load_state_dict(state)
    loader = DataLoader(range(LENGTH), BATCH_SIZE, sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    used: list[int] = []
    for batch in itertools.islice(sampler.track(loader), num_batches):
        used += batch.tolist()
    return used, sampler.state_dict()


def _stateful(state: Any, num_workers: int, num_batches: int | None, options: dict[str, Any]) -> tuple[list[int], Any]:
    """torchdata's loader keeps the sampler's state of the batch that it handed out."""
    sampler = px.DistributedSampler(range(LENGTH), **options)  # type: ignore[arg-type]
    loader = StatefulDataLoader(range(LENGTH), BATCH_SIZE, sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    if state is not None:
        loader.load_state_dict(state)
    used: list[int] = []
    for batch in itertools.islice(loader, num_batches):
        used += batch.tolist()
    return used, loader.state_dict()


LOADERS = {"track": _tracked, "torchdata": _stateful}


def _journey(
    how: str, num_workers: int, worlds: list[tuple[int, int | None]], **options: Any
) -> tuple[list[list[int]], Any]:
    """What each stage used, over all its ranks, and the last state."""
    state, used = None, []
    for world_size, num_batches in worlds:
        ranks = run_ranks(LOADERS[how], world_size, state, num_workers, num_batches, options)
        done = [part for part in ranks if part is not None]
        used.append([index for indices, _ in done for index in indices])
        state = done[0][1]
    return used, state


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", LOADERS)
def test_every_sample_once_over_changing_worlds(how: str, num_workers: int) -> None:
    used, _ = _journey(how, num_workers, [(2, 2), (3, 1), (1, 2), (2, None)])
    assert [len(part) for part in used] == [12, 9, 6, 20]
    assert sorted(itertools.chain(*used)) == list(range(LENGTH))
    assert sorted(used[0]) == sorted(ORDER[:12]), "the first stage has the beginning of torch's order"


@pytest.mark.parametrize("how", LOADERS)
def test_padding_is_at_the_very_end_only(how: str) -> None:
    used, _ = _journey(how, 0, [(3, 2), (4, 2), (3, None)])
    assert [len(part) for part in used] == [18, 24, 6]
    count = Counter(itertools.chain(*used))
    assert set(count) == set(range(LENGTH))
    assert [index for index, times in count.items() if times == 2] == ORDER[:1]


@pytest.mark.parametrize("how", LOADERS)
def test_dropping_is_at_the_very_end_only(how: str) -> None:
    used, _ = _journey(how, 0, [(4, 1), (3, 1), (3, None)], drop_last=True)
    count = Counter(itertools.chain(*used))
    assert set(count.values()) == {1}
    assert set(range(LENGTH)) - set(count) == set(ORDER[-2:])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", LOADERS)
def test_an_epoch_that_is_over_is_followed_by_the_next(how: str, num_workers: int) -> None:
    used, _ = _journey(how, num_workers, [(2, 3), (2, None), (3, None)])
    assert sorted(used[0] + used[1] + ORDER[:1]) == sorted([*range(LENGTH), *ORDER[:1] * 2])
    assert sorted(used[2]) == sorted(itertools.chain(*(_torchs(3, rank, 1) for rank in range(3))))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", LOADERS)
def test_the_last_batch_in_hand_leaves_an_empty_rest(how: str, num_workers: int) -> None:
    """Saved in the loop's last round: 47 samples on one rank are 16 batches, and the seventeenth ask ends the loop."""
    used, _ = _journey(how, num_workers, [(1, 16), (1, None)])
    assert len(used[0]) == LENGTH
    assert used[1] == []


def _epochs(num_workers: int, stateful: bool) -> list[list[int]]:
    sampler = px.DistributedSampler(range(LENGTH))  # type: ignore[arg-type]
    kind = StatefulDataLoader if stateful else DataLoader
    loader = kind(
        range(LENGTH),  # type: ignore[arg-type]
        BATCH_SIZE,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    return [[int(index) for batch in loader for index in batch] for _ in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stateful", [False, True])
def test_epochs_advance_by_themselves_under_a_loader(stateful: bool, num_workers: int) -> None:
    for rank, epochs in enumerate(run_ranks(_epochs, 2, num_workers, stateful)):
        assert epochs == [_torchs(2, rank, epoch) for epoch in range(3)]


def _set_epochs(first: int, state: Any) -> tuple[list[list[int]], Any]:
    """The loop that people have: the epoch is set, and the loader's state is loaded before."""
    sampler = px.DistributedSampler(range(LENGTH))  # type: ignore[arg-type]
    loader = StatefulDataLoader(range(LENGTH), BATCH_SIZE, sampler=sampler)  # type: ignore[arg-type]
    if state is not None:
        loader.load_state_dict(state)
    seen, saved = [], None
    for epoch in range(first, first + 2):
        sampler.set_epoch(epoch)
        seen.append([])
        for number, batch in enumerate(loader):
            seen[-1] += batch.tolist()
            if number == 1 and epoch == first + 1:
                saved = loader.state_dict()
    return seen, saved


def test_a_loop_that_sets_epochs_resumes_too() -> None:
    began = run_ranks(_set_epochs, 2, 4, None)
    assert began[0] is not None and began[0][0] == [_torchs(2, 0, 4), _torchs(2, 0, 5)]
    resumed = run_ranks(_set_epochs, 2, 5, began[0][1])
    assert resumed[1] is not None and resumed[1][0] == [_torchs(2, 1, 5)[2 * BATCH_SIZE :], _torchs(2, 1, 6)]


def _without_batches(state: Any) -> tuple[list[int], Any]:
    sampler = px.DistributedSampler(range(LENGTH))  # type: ignore[arg-type]
    loader = StatefulDataLoader(range(LENGTH), batch_size=None, sampler=sampler)  # type: ignore[arg-type]
    if state is not None:
        loader.load_state_dict(state)
    return [int(index) for index in itertools.islice(loader, 5)], loader.state_dict()


def test_a_stateful_loader_without_batches() -> None:
    first = run_ranks(_without_batches, 2, None)
    assert first[0] is not None
    second = run_ranks(_without_batches, 2, first[0][1])
    for rank in range(2):
        parts = first[rank], second[rank]
        assert [index for part in parts if part for index in part[0]] == _torchs(2, rank, 0)[:10]


def _refused(state: Any) -> str:
    sampler = px.DistributedSampler(range(LENGTH), seed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed: the sampler has 1, the state 0") as caught:
        sampler.load_state_dict(state)
    dist.barrier()  # every rank has the error, and none is left behind
    return str(caught.value)


def test_a_state_of_another_order_is_refused_on_every_rank() -> None:
    _, state = _journey("track", 0, [(2, 1)])
    told = run_ranks(_refused, 3, state)
    assert len(set(told)) == 1


def test_track_wants_a_loader_of_this_sampler_and_batches_it_can_count() -> None:
    data: Any = range(LENGTH)
    sampler, other = px.DistributedSampler(data, 2, 0), px.DistributedSampler(data, 2, 0)
    with pytest.raises(ValueError, match="made with this sampler, got DataLoader"):
        sampler.track(DataLoader(data, sampler=other))

    class Uneven(BatchSampler):
        pass

    batches = Uneven(sampler, 2, False)
    batches.batch_size = None  # type: ignore[assignment]
    loader = DataLoader(data, batch_sampler=batches)
    with pytest.raises(ValueError, match=r"Uneven has no batch_size.*advance"):
        sampler.track(loader)
    assert [int(x) for x in sampler.track(DataLoader(data, batch_size=None, sampler=sampler))] == _torchs(2, 0, 0)
    dropping = DataLoader(data, 5, sampler=sampler, drop_last=True)
    assert len(list(sampler.track(dropping))) == 4
    assert sampler.state_dict()["ended"], "what the loader drops at the end is no rest of the epoch"
    assert torch.equal(sampler.indices(), torch.tensor(_torchs(2, 0, 1)))
