"""Point-to-point between local ranks: tags, any source, and messages of any size.

A short message is one letter: it travels inside the packet and waits at the receiver until it is asked for. A long one
is offered first; when the receiver has a matching request, the sender passes it through the mail slots of its staging
memory. Requests are matched in the order in which they were made, messages in the order in which they were sent.

Everything here but `send` and `recv` runs on the watching thread, so nothing is locked.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.comm.shm.arena import STAGING, Arena
from phalanx.comm.shm.exchange import STAGING_BYTES
from phalanx.comm.shm.failure import Failure, Fate
from phalanx.comm.shm.mail import ACCEPT, DATA, LETTER, MAX_LETTER, OFFER, REFUSE, TAKEN, Mail, Packet
from phalanx.comm.shm.memory import buffer_at
from phalanx.comm.shm.work import ShmWork
from phalanx.errors import MismatchError, PhalanxError

NUM_MAIL_SLOTS = 4
MAIL_SLOT_BYTES = 512 << 10
MAIL_BYTES = NUM_MAIL_SLOTS * MAIL_SLOT_BYTES
ANY = -1

Finish = Callable[[BaseException | None, int], None]


@dataclass
class _Send:
    number: int
    rank: int
    tag: int
    data: Tensor
    text: str
    finish: Finish
    deadline: float
    sent: int = 0
    taken: int = 0


@dataclass
class _Receive:
    rank: int  # or ANY
    tag: int
    data: Tensor
    text: str
    finish: Finish
    deadline: float
    got: int = 0

    def takes(self, rank: int, tag: int) -> bool:
        return self.tag == tag and self.rank in (ANY, rank)


@dataclass
class _Arrival:
    rank: int
    packet: Packet


@dataclass
class _State:
    wanted: list[_Receive] = field(default_factory=list)
    arrived: list[_Arrival] = field(default_factory=list)
    offered: dict[int, _Send] = field(default_factory=dict)
    sending: deque[_Send] = field(default_factory=deque)
    receiving: dict[tuple[int, int], _Receive] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(NUM_MAIL_SLOTS)))


class PostOffice:
    def __init__(self, mail: Mail, arena: Arena, fate: Fate, *, locals: list[int]) -> None:
        self._mail = mail
        self._arena = arena
        self._fate = fate
        self._index = {rank: i for i, rank in enumerate(locals)}
        self._gone: set[int] = set()
        self._numbers = itertools.count(1)
        self._state = _State()
        self._timer = False
        mail.deliver = self._deliver
        mail.on_leave = self._left
        fate.on_failure(lambda _: self._mail.loop.post(self._fail_all))

    # ---- the callers' side -----------------------------------------------------------------------------------

    def send(self, data: Tensor, rank: int, tag: int, text: str, *, timeout_s: float, finish: Finish) -> None:
        """`data` is flat bytes and must not change until `finish` is called."""
        self._fate.check()
        request = _Send(next(self._numbers), rank, tag, data, text, finish, time.monotonic() + timeout_s)
        self._mail.loop.post(lambda: self._start_send(request))

    def recv(self, data: Tensor, rank: int, tag: int, text: str, *, timeout_s: float, finish: Finish) -> None:
        """`rank` may be ANY; `finish` is told the rank that sent."""
        self._fate.check()
        request = _Receive(rank, tag, data, text, finish, time.monotonic() + timeout_s)
        self._mail.loop.post(lambda: self._start_receive(request))

    # ---- sending ---------------------------------------------------------------------------------------------

    def _start_send(self, request: _Send) -> None:
        if self._refuse_failed(request.finish):
            return
        length = request.data.numel()
        about = {"text": request.text, "tag": request.tag, "number": request.number, "length": length}
        if request.rank == self._fate.rank or length <= MAX_LETTER:
            body = bytes(buffer_at(request.data.data_ptr(), length)) if length else b""
            packet = Packet(LETTER, body=body, **about)  # type: ignore[arg-type]
            if request.rank == self._fate.rank:
                self._deliver(request.rank, packet)
            elif request.rank in self._gone:
                request.finish(self._gone_error(request.rank, f"send({request.text})"), -1)
                return
            else:
                self._mail.post(request.rank, packet)
            request.finish(None, -1)
        elif request.rank in self._gone:
            request.finish(self._gone_error(request.rank, f"send({request.text})"), -1)
        else:
            self._state.offered[request.number] = request
            self._mail.post(request.rank, Packet(OFFER, **about))  # type: ignore[arg-type]
            self._watch_deadlines(request.deadline)

    def _pump(self) -> None:
        """Fill free slots, in turn for every transfer under way."""
        state = self._state
        while state.free and state.sending:
            request = state.sending.popleft()
            slot = state.free.pop()
            length = min(MAIL_SLOT_BYTES, request.data.numel() - request.sent)
            base = STAGING_BYTES + slot * MAIL_SLOT_BYTES
            self._arena.staging[base : base + length].copy_(request.data[request.sent : request.sent + length])
            request.sent += length
            if request.sent < request.data.numel():
                state.sending.append(request)
            self._mail.post(request.rank, Packet(DATA, slot=slot, number=request.number, length=length))

    # ---- receiving -------------------------------------------------------------------------------------------

    def _start_receive(self, request: _Receive) -> None:
        if self._refuse_failed(request.finish):
            return
        for k, arrival in enumerate(self._state.arrived):
            if request.takes(arrival.rank, arrival.packet.tag):
                del self._state.arrived[k]
                self._match(request, arrival)
                return
        if request.rank in self._gone or (request.rank == ANY and len(self._gone) == len(self._index) - 1):
            gone = request.rank if request.rank != ANY else min(self._gone, default=self._fate.rank)
            request.finish(self._gone_error(gone, f"recv({request.text})"), -1)
            return
        self._state.wanted.append(request)
        self._watch_deadlines(request.deadline)

    def _deliver(self, rank: int, packet: Packet) -> None:
        state = self._state
        if packet.kind in (LETTER, OFFER):
            for k, request in enumerate(state.wanted):
                if request.takes(rank, packet.tag):
                    del state.wanted[k]
                    self._match(request, _Arrival(rank, packet))
                    return
            state.arrived.append(_Arrival(rank, packet))
        elif packet.kind == ACCEPT:
            accepted = state.offered.get(packet.number)
            if accepted is not None:
                state.sending.append(accepted)
                self._pump()
        elif packet.kind == REFUSE:
            refused = state.offered.pop(packet.number, None)
            if refused is not None:
                refused.finish(self._error(packet.text), -1)
        elif packet.kind == DATA:
            self._take(rank, packet)
        elif packet.kind == TAKEN:
            request_sent = state.offered.get(packet.number)
            if request_sent is None:
                return
            state.free.append(packet.slot)
            request_sent.taken += packet.length
            if request_sent.taken == request_sent.data.numel():
                del state.offered[packet.number]
                request_sent.finish(None, -1)
            self._pump()

    def _match(self, request: _Receive, arrival: _Arrival) -> None:
        packet, rank = arrival.packet, arrival.rank
        if packet.text != request.text:
            said = (
                f"rank {rank} sent {packet.text} with tag {packet.tag}, but rank {self._fate.rank} receives "
                f"{request.text} for it; both sides must name the same dtype and number of elements"
            )
            if packet.kind == OFFER:
                self._mail.post(rank, Packet(REFUSE, said, number=packet.number))
            request.finish(self._error(said), -1)
        elif packet.kind == LETTER:
            if packet.length:
                request.data.copy_(torch.frombuffer(bytearray(packet.body), dtype=torch.uint8))
            request.finish(None, rank)
        else:
            self._state.receiving[rank, packet.number] = request
            self._watch_deadlines(request.deadline)
            self._mail.post(rank, Packet(ACCEPT, number=packet.number))

    def _take(self, rank: int, packet: Packet) -> None:
        request = self._state.receiving.get((rank, packet.number))
        if request is None:  # given up after a failure
            return
        memory = self._arena.segments[STAGING].peers[self._index[rank]]
        base = STAGING_BYTES + packet.slot * MAIL_SLOT_BYTES
        request.data[request.got : request.got + packet.length].copy_(memory[base : base + packet.length])
        request.got += packet.length
        self._mail.post(rank, Packet(TAKEN, slot=packet.slot, number=packet.number, length=packet.length))
        if request.got == request.data.numel():
            del self._state.receiving[rank, packet.number]
            request.finish(None, rank)

    # ---- what goes wrong -------------------------------------------------------------------------------------

    def _error(self, text: str) -> MismatchError:
        return MismatchError(text, rank=self._fate.rank, group=self._fate.group)

    def _gone_error(self, rank: int, during: str) -> PhalanxError:
        failure = self._fate.explain(rank, during, timeout_s=0)
        return failure.error(rank=self._fate.rank, group=self._fate.group)

    def _refuse_failed(self, finish: Finish) -> bool:
        failure = self._fate.failure
        if failure is not None:
            finish(failure.error(rank=self._fate.rank, group=self._fate.group), -1)
        return failure is not None

    def _left(self, rank: int) -> None:
        """A peer's connection ended: what still waits for it waits in vain."""
        self._gone.add(rank)
        state = self._state
        for sent in [s for s in state.offered.values() if s.rank == rank]:
            del state.offered[sent.number]
            sent.finish(self._gone_error(rank, f"send({sent.text})"), -1)
        alone = len(self._gone) == len(self._index) - 1
        for wanted in [w for w in state.wanted if w.rank == rank or (w.rank == ANY and alone)]:
            state.wanted.remove(wanted)
            wanted.finish(self._gone_error(rank, f"recv({wanted.text})"), -1)
        for key in [k for k in state.receiving if k[0] == rank]:
            request = state.receiving.pop(key)
            request.finish(self._gone_error(rank, f"recv({request.text})"), -1)

    def _pending(self) -> list[_Send | _Receive]:
        state = self._state
        return [*state.offered.values(), *state.wanted, *state.receiving.values()]

    def _fail_all(self) -> None:
        pending, self._state = self._pending(), _State()
        for request in pending:
            self._refuse_failed(request.finish)

    def _watch_deadlines(self, deadline: float) -> None:
        if not self._timer:
            self._timer = True
            self._mail.loop.later(max(deadline - time.monotonic(), 0.001), self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._timer = False
        pending = self._pending()
        late = [request for request in pending if request.deadline <= time.monotonic()]
        if late:
            first = late[0]
            verb = "send to" if isinstance(first, _Send) else "recv from"
            whom = "any rank" if first.rank == ANY else f"rank {first.rank}"
            self._fate.fail(
                Failure("timeout", first.rank, f"Timed out waiting in {verb} {whom} of {first.text}, tag {first.tag}")
            )
        elif pending:
            self._watch_deadlines(min(request.deadline for request in pending))


def finisher(work: ShmWork, then: Callable[[], None] | None = None) -> Finish:
    """Completes `work`; `then` runs first where all went well."""

    def finish(error: BaseException | None, source: int) -> None:
        if error is None and then is not None:
            then()
        work.finish(error, source=source if source >= 0 else None)

    return finish
