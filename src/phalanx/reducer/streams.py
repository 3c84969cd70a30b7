"""On a GPU: in which streams a bucket is filled, so that its reduction comes after all of them.

Streams are told apart by their number, which costs a tenth of a µs to ask for; making torch's object for one costs some µs,
and 30 where caches are cold.
"""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> int:
    """A number for the stream in which work on a device is queued now; zero on the CPU."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def stream_object(device: torch.device) -> torch.cuda.Stream:
    """torch's object for that stream, made once: what waits for it or records in it needs one."""
    key = (device.index, current_stream(device))
    known = _objects.get(key)
    if known is None:
        known = _objects[key] = torch.cuda.current_stream(device)
    return known


_objects: dict[tuple[int | None, int], torch.cuda.Stream] = {}


HOME = -1
"""In place of a stream's number: that in which the first gradient of a pass comes. It may be another in every pass."""


class FillStreams:
    """The streams in which gradients were put into a bucket in this step; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._used: dict[int, torch.cuda.Stream] = {}

    def note(self) -> None:
        """What was just put into the bucket is there when the current stream comes to it; on the CPU it is there."""
        if self._is_gpu:
            number = current_stream(self._device)
            if number not in self._used:
                self._used[number] = stream_object(self._device)

    def forget(self) -> None:
        """The step was given up: nothing waits for what it has put there."""
        self._used.clear()

    def join(self) -> None:
        """Let the current stream come after all that has filled the bucket."""
        if self._used:
            here = current_stream(self._device)
            for number, stream in self._used.items():
                if number != here:
                    stream_object(self._device).wait_stream(stream)
            self._used.clear()
