"""A bucket that was filled in several streams leaves after all of them; a made-up device, tests/gpu has a real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from phalanx.reducer import streams as streams_module
from phalanx.reducer.streams import FillStreams, current_stream


class Stream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.waited_for: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(streams={number: Stream(number) for number in (0, 7, 8)}, current=0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: made.current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.streams[made.current])
    monkeypatch.setattr(streams_module, "_objects", {})
    return made


def test_one_stream_waits_for_nothing(device: SimpleNamespace) -> None:
    streams = FillStreams(torch.device("cuda", 0))
    for _ in range(2):
        streams.note()
        streams.note()
        streams.join()
    assert not device.streams[0].waited_for


def test_the_stream_that_reduces_waits_for_the_others(device: SimpleNamespace) -> None:
    streams = FillStreams(torch.device("cuda", 0))
    for number in (7, 0, 8, 7):
        device.current = number
        streams.note()
    device.current = 0
    streams.join()
    assert sorted(device.streams[0].waited_for) == [7, 8]
    streams.join()  # once
    device.current = 7
    streams.note()
    device.current = 0
    streams.join()
    assert sorted(device.streams[0].waited_for) == [7, 7, 8]


def test_nothing_on_the_cpu() -> None:
    streams = FillStreams(torch.device("cpu"))
    streams.note()
    streams.join()
    assert current_stream(torch.device("cpu")) == 0
