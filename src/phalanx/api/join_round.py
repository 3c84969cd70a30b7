"""One loop over uneven data: who still has batches, and what ranks that have none do meanwhile.

Before the first batch the ranks tell each other whether they have one. From then on each rank knows, while it works on
a batch, whether another follows, and says so in the control block of the batch's steps: nothing is sent for it. So at
every batch's end all ranks know who goes on. (A batch without a step, as in accumulation, is followed by a word of one
number.) From the first batch that some rank does not have, each step is led: ranks with data say which module is about
to be reduced, one number per rank, and the others shadow that module's step. When nobody leads, the loop is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from phalanx.api.replica import Replica
from phalanx.api.sync_batch_norm import Shadowing
from phalanx.comm.c10d import C10dGroup
from phalanx.comm.guard import CollectiveGuard
from phalanx.errors import (
    GroupAbortedError,
    MismatchError,
    OutOfDataError,
    PeerFailedError,
    PeerLostError,
    PhalanxError,
)
from phalanx.reducer.unused import Flag, Report

WhenOut = Literal["shadow", "stop", "error"]
COME_WITHIN_S = 1800.0  # ranks may be long in coming to a loop: a slow loader, an evaluation on one of them


class Round:
    """One rank's side of one loop. All ranks make their rounds in the same order, with the same modules and mode."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        when_out: WhenOut,
        layers: Sequence[tuple[str, nn.SyncBatchNorm]] = (),
        *,
        names: Sequence[str],
        known: bool,
    ) -> None:
        self._replicas = list(replicas)
        self._groups: list[C10dGroup] = [replica.group for replica in replicas]  # type: ignore[misc]
        self._group = self._groups[0]
        self._when_out = when_out
        self._names = list(names)
        self._known = known
        """Whether a rank's end is known a batch ahead; otherwise every step is led."""
        self._led = not known
        self._following = False
        self._last_batch = False
        self._stepped = False
        self._in_step = False
        self._ending: list[int] = []
        self._num_steps = 0
        self._closed: list[Callable[[], None]] = []
        self._topic = ""
        self._guard: CollectiveGuard | None = None
        self._norms: Shadowing | None = None
        if layers and self._group.size > 1:
            device = replicas[0].reducer.buckets[0].spec.device
            # In the end everything is copied from a rank that had data: estimates need not be kept.
            self._norms = Shadowing(
                layers, self._group, tell=self._note, like=torch.empty(0, device=device), keeps_stats=False
            )
        self.reason: str | None = None
        """Why this rank leaves, where that is known better than from the exception."""
        self.num_batches = 0
        self.over = False
        self.source: int | None = None
        """A rank that had data in the last step; None where every rank had data in every step."""

    # -- beginning and end -----------------------------------------------------------------------------------------

    def begin(self, *, has_batch: bool, problem: str | None) -> bool:
        """Compare with the other ranks. Returns whether there is anything to do: False where the loop is over at once."""
        said = {"has": has_batch, "problem": problem, "mode": [self._when_out, self._known, self._names]}
        answers = [
            json.loads(part)
            for part in self._group.exchange("px.join", json.dumps(said).encode(), timeout_s=COME_WITHIN_S)
        ]
        if problem is not None:
            raise ValueError(problem)
        for rank, answer in enumerate(answers):
            if answer["problem"] is not None:
                raise MismatchError(f"rank {rank} cannot join: {answer['problem']}", rank=self._group.rank)
            if answer["mode"] != said["mode"]:
                raise MismatchError(
                    f"ranks joined differently: here when_out, form and modules are {said['mode']}, "
                    f"on rank {rank} {answer['mode']}",
                    rank=self._group.rank,
                )
        self._listen()
        if self._known:
            self._ending = [rank for rank, answer in enumerate(answers) if not answer["has"]]
            return not self._decide()
        self._lead()
        return True

    def begin_batch(self, *, last: bool) -> None:
        self._last_batch = last
        self._stepped = False
        self._in_step = False
        self.num_batches += 1

    def end_batch(self) -> bool:
        """This rank's batch is over. Returns whether the loop is over for all ranks, now."""
        if not self._stepped:
            codes = self._speak(self._done if self._last_batch else self._more)
            self._ending = [rank for rank, code in enumerate(codes) if code != self._more]
        return self._decide()

    def finish(self) -> None:
        """This rank has no more batches: keep the others company until they have none either."""
        if self.over:
            return
        if self._group.size > 1 and not self._led:
            # A break, of which the others cannot know: unless they do the same, they wait for this rank.
            self.leave(None)
        elif self._group.size > 1:
            self._shadow()
        self.close()

    def leave(self, error: BaseException | None) -> None:
        """This rank leaves the loop by itself; whoever waits for it is told why, unless that is why it leaves."""
        if self.over:
            return
        told = isinstance(error, PeerFailedError | PeerLostError)
        # With a reason it was a layer's group that was aborted: who waits for this rank in the loop's has not heard.
        told = told or (isinstance(error, GroupAbortedError) and self.reason is None)
        if error is None:
            told = self._in_step  # of a step that failed the reducers tell
        if self._topic and not told:
            reason = "its loop ended before its data did" if error is None else f"{type(error).__name__}: {error}"
            text = f"it left px.join in batch {self.num_batches} of its loop: {self.reason or reason}"
            for group in self._groups:
                group.post_failure(self._topic, text)
        self.close()

    def close(self) -> None:
        self.over = True
        if self._guard is not None:
            self._guard.take_down()
        if self._norms is not None:
            self._norms.break_off(self.reason or "px.join was left")
        closed, self._closed = self._closed, []
        for action in closed:
            action()
        for group in self._groups:
            group.topics.discard(self._topic)

    def _listen(self) -> None:
        """From now on take part in what the modules' reducers do."""
        for index, replica in enumerate(self._replicas):
            reducer, flags = replica.reducer, replica.reducer.own_flags
            reducer.before_step = partial(self._before_step, index)
            reducer.own_flags = partial(self._flags, flags)
            reducer.on_report.append(self._after_step)
            self._closed += [
                partial(setattr, reducer, "before_step", None),
                partial(setattr, reducer, "own_flags", flags),
                partial(reducer.on_report.remove, self._after_step),
            ]
        self._serial = self._group.next_serial()
        self._move_on()

    def _flags(self, others: Callable[[], int]) -> int:
        return others() | (Flag.LAST if self._last_batch else Flag.NONE)

    def _move_on(self) -> None:
        """Failures are told by step: one that concerns the next must not break this one, which may still complete."""
        topic = f"px.join {self._serial}, step {self._num_steps + 1}"
        for group in self._groups:
            group.topics.discard(self._topic)
            group.topics.add(topic)
        self._topic = topic

    def _lead(self) -> None:
        """From now on some rank may have no data: say what comes, and refuse what it could not know of."""
        if self._guard is not None:
            return
        self._led = True
        allowed = [group.process_group for group in self._groups]
        if self._norms is not None:
            self._norms.prepare()
            self._norms.lead()
            allowed += self._norms.groups
        # Within a step a communication hook may use any group: ranks without data run it, too.
        self._guard = CollectiveGuard(allowed, self._refuse, rests=lambda: self._in_step)
        self._guard.raise_up()

    def _note(self, reason: str) -> None:
        self.reason = reason

    # -- who has data ----------------------------------------------------------------------------------------------

    def _decide(self) -> bool:
        """All ranks know who has no batch after this one, and draw the same conclusion."""
        ending, size = self._ending, self._group.size
        if not ending:
            return False
        if self._when_out == "stop" or (len(ending) == size and not self._led):
            self.close()
            return True
        if self._when_out == "error":
            raise self._out_of_data(ending)
        self._lead()
        return False

    def _out_of_data(self, ranks: Sequence[int]) -> PhalanxError:
        error = OutOfDataError(
            f"{_ranks(ranks)} ran out of data first, after {self.num_batches} batches; the others have more. "
            'Give all ranks equally many, or choose px.join(…, when_out="shadow") or "stop"',
            out_ranks=ranks,
            rank=self._group.rank,
            step=self._replicas[0].reducer.stats.steps,
        )
        if self._norms is not None:
            self._norms.finish()  # every rank raises this here
        self.close()
        return error

    def _after_step(self, report: Report) -> None:
        self._stepped = True
        self._num_steps += 1
        self._ending = report.ranks_with(Flag.LAST)
        self._in_step = False
        self._move_on()

    # -- led steps -------------------------------------------------------------------------------------------------
    # What a rank says: 0 or less, it has no data (less: the modules for which it keeps gradients, as bits); n, it is
    # about to reduce module n - 1; and two words for a batch that ended without a step.

    @property
    def _more(self) -> int:
        return len(self._replicas) + 1

    @property
    def _done(self) -> int:
        return len(self._replicas) + 2

    def _before_step(self, index: int) -> None:
        self._in_step = True
        if self._following or not self._led:
            return
        if self._when_out == "stop":
            raise ValueError(_STOP_NEEDS_OVER)
        codes = self._speak(index + 1)
        out = [rank for rank, code in enumerate(codes) if code <= 0]
        if out and self._when_out == "error":
            raise self._out_of_data(out)

    def _speak(self, code: int) -> list[int]:
        """Every rank says one number."""
        if self._group.size == 1:
            return [code]
        device = self._replicas[0].reducer.buckets[0].spec.device
        heard = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self._group.size)]
        try:
            self._group.all_gather(heard, torch.tensor([code], dtype=torch.int64, device=device)).wait()
            codes = [int(one) for one in self._group.read(torch.cat(heard))]
        except PhalanxError as error:
            self._give_up(error)
            raise
        leaders = [rank for rank, code in enumerate(codes) if code > 0]
        # "More" and "done" are one thing to be at: the end of a batch.
        at = {min(codes[rank], self._more) for rank in leaders}
        if len(at) > 1:
            raise self._not_together(codes)
        if leaders and len(leaders) < len(codes):
            self.source = leaders[0]
        return codes

    def _give_up(self, error: PhalanxError) -> None:
        """A number that was never answered is still on its way: nothing else can be sent in these groups."""
        self.close()
        for replica in self._replicas:
            replica.reducer.give_up(error)

    def _not_together(self, codes: Sequence[int]) -> MismatchError:
        def shown(code: int) -> str:
            if code <= 0:
                return "has no data"
            return f"reduces {self._names[code - 1]}" if code < self._more else "ended its batch without a step"

        self.close()
        return MismatchError(
            "ranks with data must reduce the same modules in the same order: "
            + ", ".join(f"rank {rank} {shown(code)}" for rank, code in enumerate(codes)),
            rank=self._group.rank,
        )

    def _shadow(self) -> None:
        self._last_batch = True
        if self._when_out == "stop":
            self.close()
            raise ValueError(_STOP_NEEDS_OVER)
        if self._norms is not None:
            self._norms.listen()
        while True:
            kept = sum(1 << index for index, replica in enumerate(self._replicas) if replica.reducer.keeps)
            codes = self._speak(-kept)
            leading = max(codes)
            if leading <= 0:
                # All are out. What some have kept (the rest of an accumulation) is reduced now, or never.
                for index in range(len(self._replicas)):
                    if any(-code >> index & 1 for code in codes):
                        self._follow(index)
                if self._norms is not None:
                    self._norms.finish()
                return
            if self._when_out == "error":
                raise self._out_of_data([rank for rank, code in enumerate(codes) if code <= 0])
            if leading < self._more:
                self._follow(leading - 1)

    def _follow(self, index: int) -> None:
        replica = self._replicas[index]
        self._following = True
        try:
            if replica.reducer.keeps:
                replica.reducer.synchronize()
                replica.num_backwards = 0
            else:
                replica.reducer.shadow()
        finally:
            self._following = False

    def _refuse(self, collective: str, group: str) -> Exception:
        where = f"{_ranks(self._ending)} {'has' if len(self._ending) == 1 else 'have'} no data left and"
        error = MismatchError(
            f"{where if self._known else 'a rank may have no data left and'} would not come to this {collective} on "
            f"group {group!r}, which px.join does not know. Move it out of the loop, give the module that runs it to "
            'px.join too, or choose px.join(…, when_out="stop")',
            rank=self._group.rank,
        )
        self.reason = error.message
        return error


_STOP_NEEDS_OVER = (
    'when_out="stop" ends the loop on every rank, and a block cannot be ended from outside: '
    'write `for batch in px.join(model, when_out="stop").over(loader)`'
)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
