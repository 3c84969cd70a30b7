"""All-reduce between local ranks, in three ways that give the same bits.

- small: every rank sends its bytes to all inside the entry packet, and each sums in rank order.
- direct: the tensors live in the arena. Rank r reduces chunk r straight out of everybody's memory and writes the
  result back to all. Nothing is copied first, and each block is written while it is still in the cache.
- staged: tensors from elsewhere. Windows go through the staging memory, which stays in the cache: each rank publishes
  the others' parts of a window, reduces its own part, publishes the result, and takes the others' results. Two ranks
  just publish all and sum both sides.
"""

from __future__ import annotations

from torch import Tensor

from phalanx.comm.shm import wire
from phalanx.comm.shm.arena import STAGING
from phalanx.comm.shm.exchange import NUM_SLOTS, SLOT_BYTES
from phalanx.comm.shm.kernels import fold
from phalanx.comm.shm.memory import buffer_at
from phalanx.comm.shm.mesh import EAGER_BYTES, Call, Mesh
from phalanx.comm.shm.wire import DIRECT, INLINE, RESULT, ROUND, STAGED, Parcel

PAIR_WINDOW_BYTES = 1 << 20  # ours and the published one stay in the cache until they are summed
DIRECT_BLOCK_BYTES = 256 << 10  # a block and its result fit a core's own cache

_HERE = {n: Parcel(INLINE, n).pack() for n in range(65)}


def all_reduce(mesh: Mesh, flat: Tensor, op: str, *, timeout_s: float, signature: bytes) -> None:
    """Reduce a flat contiguous tensor in place. Every local rank calls it with the same length, dtype and op."""
    call = mesh.begin(signature, timeout_s)
    if mesh.size == 1:
        return
    nbytes = flat.numel() * flat.element_size()
    if nbytes <= EAGER_BYTES:
        _small(call, flat, op, nbytes)
        return
    place = mesh.arena.locate(flat)
    own = Parcel(DIRECT, nbytes, *place) if place is not None else Parcel(STAGED, nbytes)
    packed = own.pack()
    for i in mesh.others:
        call.send_entry(i, packed)
    parcels = {i: call.recv_entry(i) for i in mesh.others}
    if own.mode == DIRECT and all(p.mode == DIRECT for p in parcels.values()):
        _direct(call, flat, op, parcels)
    elif mesh.size == 2 and own.mode == STAGED and parcels[mesh.others[0]].mode == STAGED:
        _pair(call, flat, op)
    else:
        _Staged(call, flat, op).run()


def _small(call: Call, flat: Tensor, op: str, nbytes: int) -> None:
    mesh = call.mesh
    packed = _HERE.get(nbytes) or Parcel(INLINE, nbytes).pack()
    body = buffer_at(flat.data_ptr(), nbytes) if nbytes else b""
    for i in mesh.others:
        call.send_entry(i, packed, body)
    parts = []
    for i in range(mesh.size):
        if i == mesh.index:
            parts.append(flat)
        else:
            call.recv_entry(i)
            parts.append(mesh.inbox_as(i, nbytes, flat.dtype))
    if nbytes:
        fold(op, parts, flat, mesh.index)


def chunks(numel: int, count: int, element_size: int) -> list[tuple[int, int]]:
    """`numel` elements cut in `count` ranges that begin on cache lines, so that no two ranks write to one."""
    line = max(1, 64 // element_size)
    step = -(-numel // (count * line)) * line
    return [(min(k * step, numel), min((k + 1) * step, numel)) for k in range(count)]


def _direct(call: Call, flat: Tensor, op: str, parcels: dict[int, Parcel]) -> None:
    mesh = call.mesh
    size = flat.element_size()
    start, stop = chunks(flat.numel(), mesh.size, size)[mesh.index]
    if start < stop:
        mine = []
        for i in range(mesh.size):
            if i == mesh.index:
                mine.append(flat[start:stop])
            else:
                parcel = parcels[i]
                base = parcel.offset + start * size
                memory = mesh.arena.segments[parcel.segment].peers[i]
                mine.append(memory[base : base + (stop - start) * size].view(flat.dtype))
        block = DIRECT_BLOCK_BYTES // size
        for pieces in zip(*(chunk.split(block) for chunk in mine), strict=True):
            total = pieces[0]  # nobody else reads our chunk, so the sum may be built up where rank 0's part was
            fold(op, pieces, total, 0)
            for piece in pieces[1:]:
                piece.copy_(total)
    for i in mesh.others:
        call.send(i, wire.CLOSE)
    for i in mesh.others:
        call.recv(i, wire.CLOSE)


def _pair(call: Call, flat: Tensor, op: str) -> None:
    """Two ranks: each publishes its windows and sums both sides itself. Half the packets, and no result to fetch.

    Three slots, as in `Streams`: by the packet of window w the peer says that it is done with w-2.
    """
    mesh = call.mesh
    other = mesh.others[0]
    segment = mesh.arena.segments[STAGING]
    window = PAIR_WINDOW_BYTES // flat.element_size()
    starts = range(0, flat.numel(), window)

    def slot(memory: Tensor, number: int, numel: int) -> Tensor:
        base = number % NUM_SLOTS * SLOT_BYTES
        return memory[base : base + numel * flat.element_size()].view(flat.dtype)

    def publish(number: int) -> None:
        own = flat[starts[number] : starts[number] + window]
        slot(segment.own, number, own.numel()).copy_(own)
        call.send(other, ROUND, number)

    publish(0)
    for number, start in enumerate(starts):
        call.recv(other, ROUND, number)
        if number + 1 < len(starts):
            publish(number + 1)
        own = flat[start : start + window]
        theirs = slot(segment.peers[other], number, own.numel())
        fold(op, [own, theirs] if mesh.index == 0 else [theirs, own], own, mesh.index)
    call.send(other, wire.CLOSE)
    call.recv(other, wire.CLOSE)


class _Staged:
    """Windows of `size` parts; a slot holds the parts for the others and, behind them, our result.

    Three slots let a rank publish window w+1 before it reduces w and takes the results of w-1. A slot is written again
    only after packets from all peers have shown that they are past reading it.
    """

    def __init__(self, call: Call, flat: Tensor, op: str) -> None:
        self._call = call
        self._mesh = call.mesh
        self._flat = flat
        self._op = op
        size = self._mesh.size
        self._part = SLOT_BYTES // (size + 1) // 64 * 64 // flat.element_size()  # in elements
        self._rounds = -(-flat.numel() // (self._part * size))
        self._slots = {i: self._views(i) for i in range(size)}

    def _views(self, index: int) -> list[Tensor]:
        segment = self._mesh.arena.segments[STAGING]
        memory = segment.own if index == self._mesh.index else segment.peers[index]
        return [memory[k * SLOT_BYTES : (k + 1) * SLOT_BYTES].view(self._flat.dtype) for k in range(NUM_SLOTS)]

    def _range(self, number: int, index: int) -> tuple[int, int]:
        start = (number * self._mesh.size + index) * self._part
        return min(start, self._flat.numel()), min(start + self._part, self._flat.numel())

    def run(self) -> None:
        self._publish(0)
        for number in range(self._rounds + 1):
            if number + 1 < self._rounds:
                self._publish(number + 1)
            if number < self._rounds:
                self._reduce(number)
            if number >= 1:
                self._take(number - 1)
        for i in self._mesh.others:
            self._call.send(i, wire.CLOSE)
        for i in self._mesh.others:
            self._call.recv(i, wire.CLOSE)

    def _publish(self, number: int) -> None:
        slot = self._slots[self._mesh.index][number % NUM_SLOTS]
        for i in self._mesh.others:
            start, stop = self._range(number, i)
            if start < stop:
                slot[i * self._part : i * self._part + stop - start].copy_(self._flat[start:stop])
            self._call.send(i, ROUND, number)

    def _reduce(self, number: int) -> None:
        mesh, k = self._mesh, number % NUM_SLOTS
        start, stop = self._range(number, mesh.index)
        base = mesh.index * self._part
        for i in mesh.others:
            self._call.recv(i, ROUND, number)
        if start < stop:
            own = self._flat[start:stop]
            parts = [
                own if i == mesh.index else self._slots[i][k][base : base + stop - start] for i in range(mesh.size)
            ]
            fold(self._op, parts, own, mesh.index)
            base = mesh.size * self._part
            self._slots[mesh.index][k][base : base + stop - start].copy_(own)
        for i in mesh.others:
            self._call.send(i, RESULT, number)

    def _take(self, number: int) -> None:
        base = self._mesh.size * self._part
        for i in self._mesh.others:
            self._call.recv(i, RESULT, number)
            start, stop = self._range(number, i)
            if start < stop:
                self._flat[start:stop].copy_(self._slots[i][number % NUM_SLOTS][base : base + stop - start])
