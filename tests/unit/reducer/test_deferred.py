"""A report that is read a step late: on a made-up device, whose copies are over when a test says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phalanx.comm import device_wait
from phalanx.errors import PeerLostError
from phalanx.reducer.deferred import DeferredReport
from phalanx.reducer.unused import ControlBlock, Flag


class Awaited(DeferredReport):
    """Its copy is over after it was asked for so often. Before, only the last of its numbers may be there."""

    def __init__(self, questions: int, flags: int = Flag.NONE, *, last_is_there: bool = False) -> None:
        control = ControlBlock(num_parameters=3, num_buckets=1, rank=0, size=2)
        tail = torch.zeros(control.length)
        super().__init__(control, tail)
        control.write(tail, used=None, late=(), weight=1.0, flags=flags) if flags else control.write_nothing(tail)
        self.start(tail, averaged=False)
        self.left, self._tail = questions, tail
        if questions:
            self._numbers[: -1 if last_is_there else None] = torch.nan

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self._numbers.copy_(self._tail)
        return super().query()


def test_a_copy_that_is_over_is_read_without_a_look_at_the_others() -> None:
    report = Awaited(questions=0)
    report.wait(lambda: pytest.fail("looked"))
    assert report.is_over()
    assert report.read() is None
    assert report.left == 0  # nor is it asked for


@pytest.mark.parametrize("last_is_there", [False, True])
def test_what_was_said_is_read_once_the_copy_is_over(last_is_there: bool) -> None:
    report = Awaited(questions=3, flags=Flag.FAILED, last_is_there=last_is_there)
    report.wait(lambda: pytest.fail("looked"))
    read = report.read()
    assert report.left == 0
    assert read is not None and read.ranks_with(Flag.FAILED) == [0]


def test_one_that_was_not_waited_for_cannot_be_taken_for_the_next() -> None:
    report = Awaited(questions=1_000_000)
    earlier = report._numbers
    report.start(report._tail, averaged=False)
    assert report._numbers is not earlier and report.is_over() and report.turn == 2
    report.wait(lambda: pytest.fail("looked"))
    current = report._numbers
    report.start(report._tail, averaged=False)
    assert report._numbers is current


def test_nothing_that_an_earlier_step_has_left_is_taken_for_this_ones() -> None:
    report = Awaited(questions=0)

    report._numbers = report._numbers.as_subclass(_QueuesCopies)
    report.start(report._tail, averaged=False)
    assert not report.is_over() and not report.query()


class _QueuesCopies(torch.Tensor):
    """Copies to it are queued, and never come."""

    def copy_(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        return self


def test_a_copy_that_never_ends_is_given_up_when_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_wait, "LOOK_EVERY_S", 0.005)
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise PeerLostError("rank 1 left", lost_ranks=[1], rank=0)

    report = Awaited(questions=1_000_000)
    with pytest.raises(PeerLostError, match="rank 1 left"):
        report.wait(look)


def test_a_device_that_has_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an assertion in a kernel, say, it does nothing more, and no rank is gone."""
    monkeypatch.setattr(device_wait, "LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(device_wait, "GRACE_S", 0.005)

    def query() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    asked = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: asked.append(device) or SimpleNamespace(query=query)
    )
    report = Awaited(questions=1_000_000)
    report._device = torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        report.wait(lambda: None)
    assert asked == [torch.device("cuda", 1)]


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
