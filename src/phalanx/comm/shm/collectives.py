"""The other collectives between local ranks, as blocking functions over flat contiguous tensors.

Every local rank calls the same function with the same signature, in the same order. Roots are local indices. Where a
function takes bytes, lengths may differ from rank to rank; each pair checks that both sides see the same length.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.shm import wire
from phalanx.comm.shm.exchange import Streams
from phalanx.comm.shm.kernels import fold
from phalanx.comm.shm.mesh import Call, Mesh

_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")
_BLOCK_BYTES = 256 << 10


def barrier(mesh: Mesh, *, timeout_s: float, signature: bytes) -> None:
    call = mesh.begin(signature, timeout_s)
    _enter(call)


def _enter(call: Call) -> None:
    packed = wire.Parcel(wire.NOTHING, 0).pack()
    for i in call.mesh.others:
        call.send_entry(i, packed)
    for i in call.mesh.others:
        call.recv_entry(i)


def broadcast(mesh: Mesh, data: Tensor, root: int, *, timeout_s: float, signature: bytes) -> None:
    call = mesh.begin(signature, timeout_s)
    if mesh.index == root:
        Streams(call, dict.fromkeys(mesh.others, data), {}).copy_to({})
    else:
        Streams(call, {root: _NO_BYTES}, {root: data.numel()}).copy_to({root: data})


def all_gather(mesh: Mesh, data: Tensor, targets: Sequence[Tensor], *, timeout_s: float, signature: bytes) -> None:
    """`targets[i]` gets local rank i's bytes."""
    call = mesh.begin(signature, timeout_s)
    _keep(data, targets[mesh.index], call)
    wanted = {i: targets[i] for i in mesh.others}
    Streams(call, dict.fromkeys(mesh.others, data), {i: t.numel() for i, t in wanted.items()}).copy_to(wanted)


def gather(
    mesh: Mesh, data: Tensor, targets: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
) -> None:
    """The root passes targets, the others None."""
    call = mesh.begin(signature, timeout_s)
    if targets is None:
        Streams(call, {root: data}, {root: 0}).copy_to({})
        return
    _keep(data, targets[mesh.index], call)
    wanted = {i: targets[i] for i in mesh.others}
    Streams(call, dict.fromkeys(mesh.others, _NO_BYTES), {i: t.numel() for i, t in wanted.items()}).copy_to(wanted)


def scatter(
    mesh: Mesh, target: Tensor, sources: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
) -> None:
    """The root passes sources, the others None."""
    call = mesh.begin(signature, timeout_s)
    if sources is None:
        Streams(call, {root: _NO_BYTES}, {root: target.numel()}).copy_to({root: target})
        return
    _keep(sources[mesh.index], target, call)
    Streams(call, {i: sources[i] for i in mesh.others}, dict.fromkeys(mesh.others, 0)).copy_to({})


def all_to_all(
    mesh: Mesh, sources: Sequence[Tensor], targets: Sequence[Tensor], *, timeout_s: float, signature: bytes
) -> None:
    call = mesh.begin(signature, timeout_s)
    _keep(sources[mesh.index], targets[mesh.index], call)
    wanted = {i: targets[i] for i in mesh.others}
    offered = {i: sources[i] for i in mesh.others}
    Streams(call, offered, {i: t.numel() for i, t in wanted.items()}).copy_to(wanted)


def reduce(mesh: Mesh, flat: Tensor, op: str, root: int, *, timeout_s: float, signature: bytes) -> None:
    """The root's tensor becomes the reduction; the others' stay as they are."""
    call = mesh.begin(signature, timeout_s)
    data = flat.view(torch.uint8)
    if mesh.index == root:
        streams = Streams(call, dict.fromkeys(mesh.others, _NO_BYTES), dict.fromkeys(mesh.others, data.numel()))
        _fold_streams(streams, flat, flat, op)
    else:
        Streams(call, {root: data}, {root: 0}).copy_to({})


def reduce_scatter(
    mesh: Mesh, inputs: Sequence[Tensor], output: Tensor, op: str, *, timeout_s: float, signature: bytes
) -> None:
    """`inputs[i]` is our part of what local rank i gets. Parts may differ in length from one i to another."""
    call = mesh.begin(signature, timeout_s)
    own = inputs[mesh.index]
    offered = {i: inputs[i].view(torch.uint8) for i in mesh.others}
    nbytes = output.numel() * output.element_size()
    if own.numel() != output.numel():
        raise ValueError(f"reduce_scatter: our own part has {own.numel()} elements but the output {output.numel()}")
    wanted = dict.fromkeys(mesh.others, nbytes)
    _fold_streams(Streams(call, offered, wanted, shares=len(mesh.others)), own, output, op)


def _fold_streams(streams: Streams, own: Tensor, output: Tensor, op: str) -> None:
    mesh, size = streams.call.mesh, own.element_size()
    in_place = own.data_ptr() == output.data_ptr()
    windows = {p.window for p in streams.sources.values() if p.mode == wire.STAGED}
    window = min(windows, default=own.numel() * size)
    if len(windows) > 1:
        raise AssertionError(f"ranks staged one reduction in windows of {sorted(windows)} bytes")

    def consume(number: int) -> None:
        start, end = number * window, min((number + 1) * window, own.numel() * size)
        for low in range(start, end, _BLOCK_BYTES):
            high = min(low + _BLOCK_BYTES, end)
            mine = own[low // size : high // size]
            parts = [mine if i == mesh.index else streams.piece(i, low, high).view(own.dtype) for i in range(mesh.size)]
            fold(op, parts, mine if in_place else output[low // size : high // size], mesh.index)

    streams.run(consume)


def _keep(source: Tensor, target: Tensor, call: Call) -> None:
    """Our own part of an exchange."""
    if source.numel() != target.numel():
        raise ValueError(f"{call}: our own part has {source.numel()} bytes but the place for it {target.numel()}")
    if source.numel() and source.data_ptr() != target.data_ptr():
        target.copy_(source)


def allocate(mesh: Mesh, nbytes: int, *, timeout_s: float, name: str) -> int:
    """Give every local rank a segment with the same number, mapped by all; returns the number."""
    arena = mesh.arena
    number, new = arena.choose(nbytes)
    call = mesh.begin(wire.signature("allocate", note=f"{name} as segment {number}"), timeout_s)
    _enter(call)
    if not new:
        return number
    fd = arena.make(number, nbytes)
    for i in mesh.others:
        call.send(i, wire.ROUND, fds=[fd])
    received: list[int] = []
    try:
        for i in mesh.others:
            call.recv(i, wire.ROUND, fds=received)
            arena.attach(number, i, received.pop())
    finally:
        for left in received:
            socket.close(left)
    return number
