"""What the passes of one module share: the group they send on, the buckets, whose turn it is, and how to wait."""

from __future__ import annotations

import copy
import hashlib
import time
import weakref

import torch

from phalanx.api.ddp import contexts as seam
from phalanx.comm.board import Poll
from phalanx.comm.c10d import C10dGroup, group_of
from phalanx.comm.group import Work
from phalanx.comm.process_groups import own_group, release_group
from phalanx.compose.rpc import peers
from phalanx.compose.rpc.agreement import ROW_LENGTH, Row, Verdict, judge
from phalanx.compose.rpc.floor import Floor
from phalanx.errors import MismatchError, PeerFailedError, PhalanxError
from phalanx.reducer.bucket import ParameterSlot, gradient_view
from phalanx.reducer.plan import BucketSpec, ParameterSpec, plan_buckets
from phalanx.reducer.reducer import Reducer

LOOK_AFTER_S = 2.0
"""How long a rank waits for the others before it asks them, by RPC, where they are."""
WITHIN_S = 1800.0  # as long as a collective may take


class Parcel:
    """A bucket of one pass: a flat buffer in ordinary memory, and each gradient's place in it.

    Not from the group's own memory, which all ranks would have to allocate in the same order: passes run in threads.
    """

    def __init__(
        self, spec: BucketSpec, specs: list[ParameterSpec], slots: list[ParameterSlot], wire: torch.dtype | None
    ):
        self.spec = spec
        self.index = spec.index
        self.slots = slots
        dtype = wire if wire is not None and spec.dtype.is_floating_point else spec.dtype
        self.buffer = torch.empty(0 if spec.sparse else spec.numel, dtype=dtype, device=spec.device)
        self.views = (
            []
            if spec.sparse
            else [
                gradient_view(self.buffer, offset, specs[index])
                for offset, index in zip(spec.offsets, spec.parameters, strict=True)
            ]
        )


class Rounds:
    """The sending side of a module's passes. Made when the first forward pass in a context is over; that is collective."""

    def __init__(self, engine: Reducer) -> None:
        self.engine = engine
        self.floor = Floor()
        self.broken: PhalanxError | None = None
        self.draining: list[Work] = []
        """What a pass that was broken off has sent: to be over before anything else is sent."""
        self.specs: list[ParameterSpec] = []
        self.plan: tuple[BucketSpec, ...] = ()
        self.bucket_of: dict[int, int] = {}
        self._spare: list[list[Parcel]] = []
        self._key = seam.key_of(engine)
        self._num_agreed = 0
        assert isinstance(engine.group, C10dGroup)
        self._main = engine.group
        self._lay_out()
        self._agree()
        self.group = group_of(own_group(self._main.process_group))
        if self.group.process_group is not self._main.process_group:
            weakref.finalize(self, release_group, self.group.process_group).atexit = False

    # -- the layout ------------------------------------------------------------------------------------------------

    def _lay_out(self) -> bool:
        """Plan buckets for the parameters as they are now; returns whether that changed anything."""
        slots, known = self.engine.slots, self.engine.layout.specs
        specs = [
            ParameterSpec.of(slot.name, slot.parameter, sparse=spec.sparse)
            for slot, spec in zip(slots, known, strict=True)
        ]
        if specs == self.specs:
            return False
        self.specs = specs
        self.plan = plan_buckets(specs, range(len(specs) - 1, -1, -1), self.engine.options.policy)
        self.bucket_of = {index: spec.index for spec in self.plan for index in spec.parameters}
        self._spare = []
        return True

    def refresh(self) -> None:
        """Before a pass: parameters may have been cast or moved in place, on all ranks alike. Collective if they were."""
        if self.broken is not None:
            raise copy.copy(self.broken)
        self.group.check_notices()  # a rank that broke off may have left a round open, which would be taken for the next
        if self._lay_out():
            self._agree()

    def _agree(self) -> None:
        """Wait until all ranks are here, with the same parameters. Through the store: nothing else is known to fit yet."""
        board = self._main.board
        if board is None:
            return
        key = f"contexts/{self.engine.label}/{self._num_agreed}"
        self._num_agreed += 1
        mine = hashlib.sha256(repr(self.specs).encode()).digest()
        board.try_put(f"{key}/{self._main.rank}", mine)
        poll, looked = Poll(WITHIN_S), time.monotonic()
        for rank in range(self._main.size):
            while (theirs := board.try_get(f"{key}/{rank}")) is None:
                self._main.check_notices()
                if poll.expired():
                    raise MismatchError(
                        f"rank {rank} has not run {self.engine.name} in a context of distributed autograd within "
                        f"{WITHIN_S:g} s, as this rank has",
                        rank=self._main.rank,
                    )
                if time.monotonic() - looked > LOOK_AFTER_S:
                    self._look()
                    looked = time.monotonic()
                poll.pause()
            if theirs != mine:
                raise MismatchError(
                    f"the parameters of {self.engine.name} differ from those of rank {rank} in shape, dtype or device",
                    rank=self._main.rank,
                )

    # -- memory ----------------------------------------------------------------------------------------------------

    def borrow(self) -> list[Parcel]:
        hooked = self.engine.bucket_hook is not None
        if self._spare and not hooked:
            return self._spare.pop()
        wire = None if hooked else self.engine.options.wire_dtype  # a hook gets gradients as they are
        slots = self.engine.slots
        return [Parcel(spec, self.specs, [slots[index] for index in spec.parameters], wire) for spec in self.plan]

    def give_back(self, parcels: list[Parcel]) -> None:
        if parcels and self.engine.bucket_hook is None and len(self._spare) < 2 and parcels[0].spec is self.plan[0]:
            self._spare.append(parcels)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def send_row(self, row: Row, used: list[int] | None = None) -> tuple[torch.Tensor, list[Work]]:
        """Tell the others where this rank is, and which parameters it used where ranks ask that."""
        size = self.group.size
        numbers = [0] * (size * ROW_LENGTH)
        numbers[self.group.rank * ROW_LENGTH : (self.group.rank + 1) * ROW_LENGTH] = row.numbers()
        told = torch.tensor(numbers + (used or []), dtype=torch.int64, device=self.plan[0].device)
        return told, [self.group.all_reduce(told)] if size > 1 else []

    def judged(self, told: torch.Tensor) -> tuple[Verdict, list[int]]:
        """What follows from everyone's row, and by parameter how many ranks used it."""
        numbers = self.group.read(told)
        length = self.group.size * ROW_LENGTH
        rows = [Row.of(numbers[at : at + ROW_LENGTH]) for at in range(0, length, ROW_LENGTH)]
        return judge(rows), numbers[length:]

    def drain(self) -> None:
        works, self.draining = self.draining, []
        self.wait(works)

    def wait(self, works: list[Work]) -> None:
        """Wait, and ask around when it takes long. What goes wrong here leaves the ranks apart for good."""
        try:
            for work in works:
                self._wait_for(work)
        except PhalanxError as error:
            self.break_off(error)
            raise

    def _wait_for(self, work: Work) -> None:
        while not work.ended_within(LOOK_AFTER_S):
            self._look()

    def _look(self) -> None:
        """Raise if some rank is at something that cannot end before this rank has gone on."""
        for peer in peers.ask(self._key):
            if peer.rank == self._main.rank or not peer.problem:
                continue
            if peer.topic:
                self._main.post_failure(
                    peer.topic,
                    f"it is in a backward pass of {self.engine.name} within a context of distributed autograd",
                )
            raise MismatchError(
                f"this rank is in a pass of {self.engine.name} within a context of distributed autograd, and rank "
                f"{peer.rank} {peer.problem}: it will not come. All ranks must run as many passes in contexts",
                rank=self._main.rank,
                group=self._main.name,
            )

    def break_off(self, error: PhalanxError) -> None:
        """This rank did not come to the end of a round: nobody can tell what the next would be paired with."""
        if self.broken is None:
            self.broken = copy.copy(error)  # without its traceback, which leads to the model
            if not isinstance(error, PeerFailedError):
                self.group.post_failure("", str(error))
