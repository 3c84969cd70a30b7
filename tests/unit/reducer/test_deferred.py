"""A report that is read a step late: on a made-up device, whose copies are over when a test says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phalanx.comm import device_wait
from phalanx.errors import PeerLostError
from phalanx.reducer import streams
from phalanx.reducer.deferred import DeferredReport
from phalanx.reducer.unused import ControlBlock, Flag


class Copied:
    """In an event's place: over after some looks."""

    def __init__(self, looks: int) -> None:
        self.left = looks
        self.streams: list[str] = []

    def record(self, stream: str) -> None:
        self.streams.append(stream)

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def awaited(looks: int, flags: int = Flag.NONE) -> tuple[DeferredReport, Copied]:
    control = ControlBlock(num_parameters=3, num_buckets=1, rank=0, size=2)
    tail = torch.zeros(control.length)
    report, copied = DeferredReport(control, tail), Copied(looks)
    report._copied = copied  # type: ignore[assignment]
    control.write(tail, used=None, late=(), weight=1.0, flags=flags) if flags else control.write_nothing(tail)
    report.start(tail, averaged=False)
    return report, copied


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    monkeypatch.setattr(streams, "_objects", {})


def test_a_copy_that_is_over_is_read_without_a_look_at_the_others() -> None:
    report, copied = awaited(looks=0)
    report.wait(lambda: pytest.fail("looked"))
    assert report.is_over()
    assert report.read() is None
    assert copied.streams == ["that of cpu"]  # the tensor's device, whichever is the current one


def test_what_was_said_is_read_once_the_copy_is_over() -> None:
    report, _ = awaited(looks=3, flags=Flag.FAILED)
    report.wait(lambda: pytest.fail("looked"))
    read = report.read()
    assert read is not None and read.ranks_with(Flag.FAILED) == [0]


def test_a_copy_that_never_ends_is_given_up_when_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_wait, "LOOK_EVERY_S", 0.005)
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise PeerLostError("rank 1 left", lost_ranks=[1], rank=0)

    report, _ = awaited(looks=1_000_000)
    with pytest.raises(PeerLostError, match="rank 1 left"):
        report.wait(look)


def test_whether_a_graph_is_captured_is_asked_of_the_device_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(current=0)

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, made.current = made.current, self.index

        def __exit__(self, *_: object) -> None:
            made.current = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.current == 1)
    assert not device_wait.is_capturing(torch.device("cuda", 0))
    assert device_wait.is_capturing(torch.device("cuda", 1))
    assert made.current == 0
    assert not device_wait.is_capturing(torch.device("cpu"))
