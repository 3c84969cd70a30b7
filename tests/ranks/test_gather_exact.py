"""`gather_exact` against one process that has all samples, on Gloo and on shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import phalanx as px
from phalanx.errors import PeerLostError
from phalanx.testing import run_ranks

BACKENDS = ["gloo", "phalanx"]


def _prediction(index: torch.Tensor) -> dict[str, Any]:
    """What a model would say for these samples: each row is a function of its sample."""
    x = index.double()
    return {
        "scores": torch.stack([x.sin(), x.cos(), x.sqrt()], dim=1).float(),
        "pair": (index % 3, [(index % 2 == 0), torch.complex(x, -x)[:, None, None].expand(-1, 2, 1)]),
        "half": x.bfloat16(),
    }


def _assert_whole(result: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(result, expected) and result.dtype == expected.dtype
        return
    assert type(result) is type(expected) and len(result) == len(expected)
    keys = expected if isinstance(expected, dict) else range(len(expected))
    for key in keys:
        _assert_whole(result[key], expected[key])


def _evaluate(length: int, options: dict[str, Any], by_sampler: bool) -> None:
    sampler = px.DistributedSampler(range(length), **options)  # type: ignore[arg-type]
    loader = DataLoader(range(length), 3, sampler=sampler)  # type: ignore[arg-type]
    seen = [torch.empty(0, dtype=torch.int64), *loader]
    mine = _prediction(torch.cat(seen))
    whole = _prediction(torch.arange(length))
    _assert_whole(px.gather_exact(mine, sampler=sampler if by_sampler else None), whole)
    on_one = px.gather_exact(mine, sampler=sampler if by_sampler else None, dst=1)
    if dist.get_rank() == 1:
        _assert_whole(on_one, whole)
    else:
        assert on_one is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_unpadded_evaluation_is_one_process(world_size: int, backend: str) -> None:
    run_ranks(_several, world_size, backend=backend)


def _several() -> None:
    unpadded = {"shuffle": False, "pad": False}
    _evaluate(20, unpadded, by_sampler=False)
    _evaluate(1, unpadded, by_sampler=False)  # all ranks but one have nothing
    _evaluate(0, unpadded, by_sampler=False)
    _evaluate(20, {"pad": False}, by_sampler=True)
    _evaluate(20, {}, by_sampler=True)  # shuffled and padded: back in order, padding left out


@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_rows_and_explicit_indices(backend: str) -> None:
    run_ranks(_uneven, 3, backend=backend)


def _uneven() -> None:
    rank = dist.get_rank()
    counts = [2, 0, 5]
    mine = torch.full((counts[rank], 2), float(rank)).requires_grad_()
    gathered = px.gather_exact(mine)
    assert gathered[:, 0].tolist() == [0, 2, 0, 2, 2, 2, 2] and not gathered.requires_grad
    # A rank without samples has seen no batch, so it knows neither dtype nor shape.
    blind = torch.empty(0) if rank == 1 else mine.to(torch.float64)
    assert torch.equal(px.gather_exact([blind])[0], gathered.double())
    own = [[7, 3], [], [3, 0, 1, 9, 7]][rank]
    rows = torch.tensor(own, dtype=torch.int32)
    for indices in (own, rows):
        assert px.gather_exact(rows, indices=indices).tolist() == [0, 1, 3, 7, 9]
    pair = dist.new_group([0, 2])
    if rank != 1:
        assert len(px.gather_exact(mine, group=pair)) == 7
        on_one = px.gather_exact(mine, group=pair, dst=2)
        assert (on_one is None) == (rank == 0)


MISTAKES: dict[str, tuple[Callable[[int], Any], Callable[[int], dict[str, Any]], str]] = {
    "dtype": (
        lambda r: torch.ones(2, dtype=torch.float64 if r else torch.float32),
        lambda r: {},
        "on rank 0 values is a cpu tensor of torch.float32 and shape [samples], on rank 1 values is",
    ),
    "shape": (lambda r: torch.ones(r, 2 + r), lambda r: {}, "shape [samples, 2], on rank 1"),
    "structure": (
        lambda r: {"a": torch.ones(1), "bc"[r]: torch.ones(1)},
        lambda r: {},
        "rank 0 has values['b'], rank 1",
    ),
    "not a tensor": (
        lambda r: [torch.ones(1), None if r else torch.ones(1)],
        lambda r: {},
        "rank 1: values[1] must be",
    ),
    "uneven tree": (
        lambda r: [torch.ones(1), torch.ones(1 + r)],
        lambda r: {},
        "rank 1: every tensor must have one row",
    ),
    "dst": (lambda r: torch.ones(1), lambda r: {"dst": r}, "rank 0 has dst=0, rank 1 has dst=1"),
    "dst of one": (lambda r: torch.ones(1), lambda r: {"dst": 0} if r else {}, "rank 0 has dst=None, rank 1 has dst=0"),
    "dst nowhere": (
        lambda r: torch.ones(1),
        lambda r: {"dst": 5},
        "dst must be one of the group's ranks [0, 1], got 5",
    ),
    "indices on one": (
        lambda r: torch.ones(1),
        lambda r: {"indices": [0]} if r else {},
        "rank 1 has indices, rank 0 has",
    ),
    "too few indices": (
        lambda r: torch.ones(2),
        lambda r: {"indices": [0] * (2 - r)},
        "rank 1: there are 2 rows, but 1",
    ),
    "float indices": (
        lambda r: torch.ones(1),
        lambda r: {"indices": torch.ones(1)},
        "rank 0: indices must be integers",
    ),
    "sampler not used": (
        lambda r: torch.ones(1),
        lambda r: {"sampler": px.DistributedSampler(range(4))},  # type: ignore[arg-type]
        "rank 0: the sampler has not been iterated over",
    ),
}


def _told() -> dict[str, str]:
    rank, told = dist.get_rank(), {}
    for mistake, (values, keywords, _) in MISTAKES.items():
        with pytest.raises(ValueError) as caught:
            px.gather_exact(values(rank), **keywords(rank))
        told[mistake] = str(caught.value)
        assert px.gather_exact(torch.ones(rank)).tolist() == [1.0], "the group is as good as before"
    return told


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mistake_is_the_same_error_on_every_rank(backend: str) -> None:
    told = run_ranks(_told, 2, backend=backend)
    assert told[0] is not None and told[0] == told[1]
    for mistake, (_, _, expected) in MISTAKES.items():
        assert expected in told[0][mistake], mistake


def _gone() -> None:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has its group"])  # Gloo makes connections until then
        raise SystemExit(3)
    store.set("rank 0 has its group", "")
    with pytest.raises(PeerLostError, match="rank 1"):
        px.gather_exact(torch.ones(2))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_gone_leaves_nobody_waiting(backend: str) -> None:
    run_ranks(_gone, 2, backend=backend, expect_exit={1: 3}, allow_leaks="a rank leaves without closing its group")


def test_alone() -> None:
    run_ranks(_alone, 1)


def _alone() -> None:
    sampler = px.DistributedSampler(range(5))  # type: ignore[arg-type]
    mine = torch.tensor(list(sampler))
    assert px.gather_exact(mine).tolist() == mine.tolist()
    assert px.gather_exact(mine, sampler=sampler, dst=0).tolist() == [0, 1, 2, 3, 4]
