"""Memory that every rank of a host sees.

A segment is anonymous memory of one rank (`memfd_create`), mapped by all its peers. Segments are numbered, and the
number means the same on every rank because allocation is collective and ordered. Storages own their mappings, so a
tensor may outlive the group.

Memory given back with `release` is kept for a later `allocate` of a similar size; all of it goes back to the system
when the group ends and the last tensor on it dies.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.comm.shm.memory import anonymous, make_private

PAGE = 4096
STAGING = 0  # the number of the segment that every group has from the start


@dataclass
class Segment:
    """One rank's part of a numbered segment, and the same number's parts of its peers."""

    fd: int
    own: Tensor
    peers: dict[int, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.own.numel()


def map_segment(fd: int) -> Tensor:
    """The descriptor's memory as bytes. The mapping is the storage's own: the descriptor may be closed."""
    nbytes = os.fstat(fd).st_size
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)


def rounded(nbytes: int) -> int:
    """Whole pages, and above a megabyte steps of an eighth, so that memory given back fits later requests."""
    pages = max(1, -(-nbytes // PAGE))
    if pages > 256:
        step = 1 << (pages.bit_length() - 4)
        pages = -(-pages // step) * step
    return pages * PAGE


class Arena:
    """This rank's segments. Only the thread that executes the group's current call changes it."""

    def __init__(self, staging_fd: int) -> None:
        self.segments: dict[int, Segment] = {STAGING: Segment(staging_fd, map_segment(staging_fd))}
        self._by_address: dict[int, int] = {}
        self._free: list[int] = []
        self._next = STAGING + 1
        self._closed = False

    @property
    def staging(self) -> Tensor:
        return self.segments[STAGING].own

    def locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """(segment, offset in bytes) of a contiguous tensor that lives here, else None."""
        if not self._by_address:
            return None
        base = tensor.untyped_storage().data_ptr()
        number = self._by_address.get(base)
        return None if number is None else (number, tensor.data_ptr() - base)

    def choose(self, nbytes: int) -> tuple[int, bool]:
        """(number, whether it must be made) of the segment for a request: the same on every rank, called in order."""
        want = rounded(nbytes)
        fits = [n for n in self._free if want <= self.segments[n].nbytes <= 2 * want]
        if fits:
            number = min(fits, key=lambda n: (self.segments[n].nbytes, n))
            self._free.remove(number)
            return number, False
        number, self._next = self._next, self._next + 1
        return number, True

    def make(self, number: int, nbytes: int) -> int:
        """Create segment `number`; returns the descriptor to pass to the peers."""
        fd = anonymous(rounded(nbytes))
        segment = Segment(fd, map_segment(fd))
        self.segments[number] = segment
        self._by_address[segment.own.data_ptr()] = number
        return fd

    def attach(self, number: int, peer: int, fd: int) -> None:
        """Map a peer's part of segment `number` and close `fd`."""
        try:
            self.segments[number].peers[peer] = map_segment(fd)
        finally:
            os.close(fd)

    def tensor(self, number: int, numel: int, dtype: torch.dtype) -> Tensor:
        own = self.segments[number].own
        return torch.empty(0, dtype=dtype, device="cpu").set_(own.untyped_storage(), 0, (numel,))  # type: ignore[call-overload]

    def release(self, tensor: Tensor) -> None:
        """Keep the tensor's memory for a later request. The caller no longer uses the tensor or any view of it."""
        found = self.locate(tensor)
        if found is None or found[0] == STAGING:
            raise ValueError("release() takes a tensor that allocate() of the same group returned; this one is not")
        if found[0] in self._free:
            raise ValueError("release() was called twice for the same memory")
        self._free.append(found[0])

    def isolate(self) -> None:
        """Let no peer's late write show in this rank's tensors: a stopped process that wakes goes on writing."""
        for number, segment in list(self.segments.items()):
            if number != STAGING and segment.fd >= 0 and not self._closed:
                make_private(segment.own.data_ptr(), segment.nbytes, segment.fd, populate=True)

    def part_from_parent(self) -> None:
        """In a forked child: its writes must not reach the parent's peers."""
        for segment in self.segments.values():
            if segment.fd >= 0:
                make_private(segment.own.data_ptr(), segment.nbytes, segment.fd, populate=False)
        self.close()

    def close(self) -> None:
        """Drop everything but what tensors still hold."""
        self._closed = True
        for segment in self.segments.values():
            if segment.fd >= 0:
                os.close(segment.fd)
                segment.fd = -1
            segment.peers.clear()
        self._by_address.clear()
        self.segments = {}
        self._free.clear()
