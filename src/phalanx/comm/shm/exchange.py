"""Moving bytes between local ranks: what every collective but the large all-reduce is made of.

Each rank offers a stream of bytes to each peer (the same stream to several, or none) and takes one from each. Small
streams travel inside the entry packet. A stream that lives in the arena is read where it is. Any other goes through
the rank's staging memory in rounds, three slots deep: while peers read one window the next is being written.

Nobody writes into another rank's memory here, so a rank that was stopped and wakes up late can harm only itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from phalanx.comm.shm import wire
from phalanx.comm.shm.arena import STAGING
from phalanx.comm.shm.memory import buffer_at
from phalanx.comm.shm.mesh import EAGER_BYTES, Call
from phalanx.comm.shm.wire import DIRECT, INLINE, NOTHING, STAGED, Parcel

NUM_SLOTS = 3
SLOT_BYTES = 2 << 20
STAGING_BYTES = NUM_SLOTS * SLOT_BYTES  # the collectives' share of the staging segment
_ALIGN = 64

_EMPTY = Parcel(NOTHING, 0)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8)


class Streams:
    """The streams of one call, from the entry packets to the closing ones.

    `outgoing[i]` is what local peer `i` may read, as flat bytes; `expected[i]` is how many bytes we want from it. A
    peer in neither is not talked to; both sides must see the pair alike. `shares` fixes into how many parts a staging
    slot is divided, where all ranks must use windows of one length; else there is a part for each stream staged.
    """

    def __init__(
        self, call: Call, outgoing: Mapping[int, Tensor], expected: Mapping[int, int], *, shares: int = 0
    ) -> None:
        self.call = call
        self._shares = shares
        self._mesh = call.mesh
        self._peers = sorted(outgoing.keys() | expected.keys())
        self._staged: list[Tensor] = []
        self._window = 0
        self.sources: dict[int, Parcel] = {}
        self._offers = self._make_offers(outgoing)
        for i in self._peers:
            parcel = self._offers.get(i, _EMPTY)
            body = buffer_at(outgoing[i].data_ptr(), parcel.length) if parcel.mode == INLINE else b""
            call.send_entry(i, parcel.pack(), body)
        for i in self._peers:
            source = call.recv_entry(i)
            want = expected.get(i, 0)
            if source.length != want:
                theirs = f"{call} with {source.length} bytes for rank {self._mesh.fate.rank}"
                rank = self._mesh.ranks[i]
                raise call.mismatch(i, theirs, f"{call} expecting {want} bytes of rank {rank}")
            self.sources[i] = source

    def _make_offers(self, outgoing: Mapping[int, Tensor]) -> dict[int, Parcel]:
        distinct: dict[int, Parcel] = {}
        staged: dict[int, int] = {}
        for stream in outgoing.values():
            length = stream.numel()
            if id(stream) in distinct or id(stream) in staged:
                continue
            if length == 0:
                distinct[id(stream)] = _EMPTY
            elif length <= EAGER_BYTES:
                distinct[id(stream)] = Parcel(INLINE, length)
            else:
                place = self._mesh.arena.locate(stream)
                if place is not None:
                    distinct[id(stream)] = Parcel(DIRECT, length, *place)
                else:
                    staged[id(stream)] = len(self._staged)
                    self._staged.append(stream)
        if staged:
            self._window = SLOT_BYTES // (self._shares or len(staged)) // _ALIGN * _ALIGN
        for stream in outgoing.values():
            number = staged.get(id(stream))
            if number is not None:
                distinct[id(stream)] = Parcel(STAGED, stream.numel(), STAGING, 0, self._window, number)
        return {i: distinct[id(stream)] for i, stream in outgoing.items()}

    # ---- reading ---------------------------------------------------------------------------------------------

    def piece(self, index: int, start: int, stop: int) -> Tensor:
        """Bytes [start, stop) of a peer's stream; of a staged one they lie within its current window."""
        parcel = self.sources[index]
        if parcel.mode == INLINE:
            return self._mesh.inbox(index)[1][start:stop]
        memory = self._mesh.arena.segments[parcel.segment].peers[index]
        base = parcel.offset
        if parcel.mode == STAGED:
            number = start // parcel.window
            base = number % NUM_SLOTS * SLOT_BYTES + parcel.stream * parcel.window - number * parcel.window
        return memory[base + start : base + stop]

    def run(self, consume: Callable[[int], None]) -> None:
        """Calls `consume(round)` when every stream's window of that round can be read; at least once."""
        call = self.call
        rounds = {i: max(_rounds(self._offers.get(i, _EMPTY)), _rounds(self.sources[i])) for i in self._peers}
        total = max(rounds.values(), default=0)
        if total:
            self._fill(0)
            self._signal(0, rounds)
        for number in range(max(total, 1)):
            for i, count in rounds.items():
                if number < count:
                    call.recv(i, wire.ROUND, number)
            if number + 1 < total:  # its slot's last readers have said, by the packets just read, that they are done
                self._fill(number + 1)
                self._signal(number + 1, rounds)
            consume(number)
        self._close()

    def copy_to(self, targets: Mapping[int, Tensor]) -> None:
        """Copy each peer's stream to its target (flat bytes of the expected length)."""

        def consume(number: int) -> None:
            for i, target in targets.items():
                parcel = self.sources[i]
                if parcel.mode == STAGED:
                    start = number * parcel.window
                    stop = min(start + parcel.window, parcel.length)
                    if start < stop:
                        target[start:stop].copy_(self.piece(i, start, stop))
                elif number == 0 and parcel.length:
                    target.copy_(self.piece(i, 0, parcel.length))

        self.run(consume)

    def _fill(self, number: int) -> None:
        slot = number % NUM_SLOTS * SLOT_BYTES
        start = number * self._window
        for k, stream in enumerate(self._staged):
            stop = min(start + self._window, stream.numel())
            if start < stop:
                base = slot + k * self._window
                self._mesh.arena.staging[base : base + stop - start].copy_(stream[start:stop])

    def _signal(self, number: int, rounds: Mapping[int, int]) -> None:
        for i, count in rounds.items():
            if number < count:
                self.call.send(i, wire.ROUND, number)

    def _close(self) -> None:
        """Whoever let others read its memory waits until they have."""
        touched = [
            i
            for i in self._peers
            if self.sources[i].mode in (DIRECT, STAGED) or self._offers.get(i, _EMPTY).mode in (DIRECT, STAGED)
        ]
        for i in touched:
            self.call.send(i, wire.CLOSE)
        for i in touched:
            self.call.recv(i, wire.CLOSE)


def _rounds(parcel: Parcel) -> int:
    return -(-parcel.length // parcel.window) if parcel.mode == STAGED else 0
