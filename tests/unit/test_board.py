"""The notice board: what one life of a job leaves there does not concern the next, on a store that outlives both."""

from __future__ import annotations

import torch.distributed as dist

from phalanx.comm.board import Board


def boards(store: dist.Store) -> list[Board]:
    return [Board(store, rank=rank, size=2) for rank in range(2)]


def test_notices_are_read_by_all() -> None:
    first, second = boards(dist.HashStore())
    assert not second.notices()
    first.post("failed", "step 3", "no such file")
    second.post("left", "", "interrupted")
    assert [(n.rank, n.kind, n.topic, n.reason) for n in first.notices()] == [
        (0, "failed", "step 3", "no such file"),
        (1, "left", "", "interrupted"),
    ]


def test_what_was_said_in_an_earlier_life_means_nothing() -> None:
    store = dist.HashStore()
    first, second = boards(store)
    for number in range(3):
        first.post("failed", "", f"number {number}")
    first.try_put("exchange/models/0", b"mine")
    assert len(second.notices()) == 3 and second.try_get("exchange/models/0") == b"mine"

    early = Board(store, rank=1, size=2)  # the other has not come yet
    assert not early.notices() and early.try_get("exchange/models/0") is None
    late = Board(store, rank=0, size=2)
    assert not early.notices() and not late.notices()
    late.post("failed", "step 1", "again")
    assert [notice.reason for notice in early.notices()] == ["again"]
    late.try_put("exchange/models/0", b"new")
    assert early.try_get("exchange/models/0") == b"new"
    early.remove("exchange/models/0")
    assert late.try_get("exchange/models/0") is None
    assert not late.dead_ranks()


def test_a_second_notice_of_the_new_life_brings_none_of_the_old_back() -> None:
    store = dist.HashStore()
    first, _ = boards(store)
    for number in range(3):
        first.post("failed", "", f"old {number}")
    first, second = boards(store)
    for number in range(4):
        first.post("failed", "", f"new {number}")
        assert [notice.reason for notice in second.notices()] == [f"new {n}" for n in range(number + 1)]
