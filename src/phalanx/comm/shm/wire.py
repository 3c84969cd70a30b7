"""The packets on the sockets between two ranks.

Sockets are SOCK_SEQPACKET: a packet arrives whole or not at all. On the collective channel every packet begins with
`HEAD`; the first packet of a call also carries the call's signature, which is plain text: what is compared is what an
error shows. A `Parcel` then says where the bytes of the call are found.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from torch import Tensor

HEAD = struct.Struct("<BBHIQ")  # kind, phase, length of the signature, round, sequence number
MAX_SIGNATURE = 2048

COLLECTIVE = 0x50
ENTRY, ROUND, RESULT, CLOSE = range(4)  # phases of a collective call

INLINE, DIRECT, STAGED, NOTHING = range(4)  # where a parcel's bytes are
PARCEL = struct.Struct("<B3xIIiQQ")  # mode, window, stream, segment, offset, length


@dataclass(frozen=True)
class Parcel:
    """Where one rank's bytes for another are: in this very packet, in an arena segment, or in the staging slots."""

    mode: int
    length: int
    segment: int = -1
    offset: int = 0
    window: int = 0
    stream: int = 0

    def pack(self) -> bytes:
        return PARCEL.pack(self.mode, self.window, self.stream, self.segment, self.offset, self.length)

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Parcel:
        mode, window, stream, segment, offset, length = PARCEL.unpack_from(raw)
        return cls(mode, length, segment, offset, window, stream)


def head(phase: int, seq: int, *, round: int = 0, signature: bytes = b"") -> bytes:
    return HEAD.pack(COLLECTIVE, phase, len(signature), round, seq) + signature


_signatures: dict[tuple[object, ...], bytes] = {}


def signature(name: str, *, tensors: tuple[Tensor, ...] = (), op: str = "", root: int = -1, note: str = "") -> bytes:
    """The text by which ranks find that they called the same thing."""
    key = (name, op, root, note, *((t.dtype, t.shape) for t in tensors))
    known = _signatures.get(key)
    if known is not None:
        return known
    text = name + (f"({op})" if op else "")
    text += "".join(f" {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
    text += (f" root {root}" if root >= 0 else "") + (f" {note}" if note else "")
    raw = text.encode()
    if len(raw) > MAX_SIGNATURE:
        raw = raw[: MAX_SIGNATURE - 80] + b" ... " + hashlib.sha256(raw).hexdigest().encode()
    if len(_signatures) >= 4096:  # shapes that never repeat must not grow memory
        _signatures.clear()
    _signatures[key] = raw
    return raw


def describe(raw: bytes) -> tuple[int, int, str] | None:
    """(sequence number, phase, signature) of a packet that was not the one expected; None where it is not ours."""
    if len(raw) < HEAD.size:
        return None
    kind, phase, length, _, seq = HEAD.unpack_from(raw)
    if kind != COLLECTIVE:
        return None
    return seq, phase, raw[HEAD.size : HEAD.size + length].decode(errors="replace")
