"""Waiting for a device that a gone peer would keep from ever coming so far."""

from __future__ import annotations

import pytest

from phalanx.comm import device_wait
from phalanx.comm.device_wait import await_event
from phalanx.errors import PeerLostError


class Reached:
    """In an event's place: over after some queries, or when it is told."""

    def __init__(self, after: int) -> None:
        self.left = after

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_wait, "LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(device_wait, "GRACE_S", 0.02)


def gone() -> None:
    raise PeerLostError("rank 1 left", lost_ranks=[1], rank=0)


def test_what_is_there_is_not_waited_for() -> None:
    await_event(Reached(after=0), lambda: pytest.fail("looked"))


def test_looks_while_it_waits() -> None:
    event, looks = Reached(after=10**9), []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            event.left = 0

    await_event(event, look)
    assert len(looks) == 3


def test_gives_up_where_a_peer_is_gone() -> None:
    with pytest.raises(PeerLostError, match="rank 1 left"):
        await_event(Reached(after=10**9), gone)


def test_what_a_peer_has_sent_before_it_left_still_comes() -> None:
    event = Reached(after=10**9)

    def leave() -> None:
        event.left = 3
        gone()

    await_event(event, leave)
