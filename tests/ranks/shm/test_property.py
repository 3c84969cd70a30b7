"""Every collective against a plain reference, over shapes, dtypes, operations, splits, groups and threads."""

from __future__ import annotations

import threading
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from tests.ranks.shm.cases import FLOATS, INTEGERS, MOVING, REDUCING, Case, compare, ops_for, perform, start

from phalanx.comm import shm
from phalanx.testing import run_ranks

shm.register()

SHAPES = st.sampled_from([(1,), (7,), (0,), (), (3, 5), (2, 0, 3), (64, 33), (8192,), (8193,), (300, 101), (700_001,)])


@st.composite
def a_case(draw: Any) -> Case:
    name = draw(st.sampled_from(REDUCING + MOVING))
    dtype = draw(st.sampled_from([*FLOATS, *INTEGERS, torch.bool] + ([torch.complex64] if name in MOVING else [])))
    shape = draw(SHAPES)
    if name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor") and not shape:
        shape = (2,)
    return Case(
        name=name,
        dtype=dtype,
        shape=shape,
        op=draw(st.sampled_from(ops_for(dtype))) if name in REDUCING else "sum",
        root=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
        strided=draw(st.booleans()) and name != "all_reduce_coalesced",
        uneven=draw(st.booleans()),
        async_op=draw(st.booleans()),
    )


def _in_order(cases: list[Case]) -> None:
    group = dist.group.WORLD
    for case in cases:
        perform(case, group, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(
    max_examples=4,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(cases=st.lists(a_case(), min_size=30, max_size=40))
def test_each_collective_gives_what_the_reference_gives(world_size: int, cases: list[Case]) -> None:
    run_ranks(_in_order, world_size, cases, backend="phalanx", timeout_s=60)


def _interleaved(cases: list[list[Case]]) -> None:
    """Three overlapping groups, each driven by a thread of its own that keeps several calls under way."""
    rank = dist.get_rank()
    members = [[0, 1, 2], [0, 2], [1, 2]]
    groups = [dist.new_group(m) for m in members]
    errors: list[BaseException] = []

    def drive(group: Any, mine: list[Case], place: int, size: int) -> None:
        try:
            under_way = []
            for case in mine:
                work, got, wanted = start(case, group, place, size)
                under_way.append((case, work, got, wanted))
                if len(under_way) > 4:
                    case, work, got, wanted = under_way.pop(0)
                    work.wait()
                    compare(case, got, wanted)
            for case, work, got, wanted in under_way:
                work.wait()
                compare(case, got, wanted)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=drive, args=(g, c, m.index(rank), len(m)))
        for g, m, c in zip(groups, members, cases, strict=True)
        if rank in m
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    dist.barrier()


@st.composite
def an_async_case(draw: Any) -> Case:
    case = draw(a_case().filter(lambda c: c.name not in ("ring", "arena_all_reduce")))
    return Case(**{**case.__dict__, "async_op": True})


@settings(
    max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(cases=st.lists(st.lists(an_async_case(), min_size=20, max_size=30), min_size=3, max_size=3))
def test_calls_of_several_groups_and_threads_interleave(cases: list[list[Case]]) -> None:
    run_ranks(_interleaved, 3, cases, backend="phalanx", timeout_s=90)
