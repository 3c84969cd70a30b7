"""Roll call: most gradients are only counted, and looked at in runs.

Once a pass has shown in which order gradients arrive, the hook of most parameters becomes one and the same C function:
it takes the next entry off a schedule and calls it. Nearly all entries do nothing. At the end of a run stands a call that
looks whether all of the run have come, and takes them in together. That they have is proven, not assumed: when the pass
began there was no gradient of theirs (or its version was noted), now there is one, and there were exactly as many
arrivals as parameters. If the order has changed, the proof fails: what has come by then is looked at one by one, and the
parameters get hooks of their own again, at once, until an order is known anew.

    `first`'s own hook → `begin` → tick, tick, tick (run 0 is taken in) → tick (run 1) → … → end of the pass → `finish`
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch

from phalanx.reducer.bucket import ParameterSlot, gradients_of
from phalanx.reducer.grad_hooks import HookTable, count_hooks, hook_tables
from phalanx.reducer.runs import Run, plan_runs

_nothing: Callable[[], None] = [].clear  # a C function that does nothing: the cheapest entry there is


@dataclass(frozen=True)
class Rest:
    """What a pass has left to look at when it is over."""

    taken: list[ParameterSlot]
    """Those that runs have taken in."""
    arrived: list[ParameterSlot]
    absent: list[ParameterSlot]
    repeats: int
    """How many arrivals there were beyond one per parameter."""


class RollCall:
    """The schedule of a pass. `tick` is the hook of every parameter in `slots`; `first` has one of its own.

    `take` gets a run of which all have come, with their gradients. `lost` is called when the order is not kept to: by an
    arrival before the pass was begun, by a run that is not complete at its end, and by one arrival too many. It looks at
    what `finish` returns, and gives the parameters hooks of their own.
    """

    def __init__(
        self,
        first: ParameterSlot,
        slots: Sequence[ParameterSlot],
        *,
        take: Callable[[Run, list[torch.Tensor]], None],
        lost: Callable[[], None],
    ) -> None:
        self.first = first
        self.slots = list(slots)
        self.is_open = False
        """Whether a pass is under way."""
        self._take = take
        self._lost = lost
        self._schedule: deque[Callable[[], None]] = deque()
        self.tick: Callable[[torch.Tensor], None] = partial(
            next, map(operator.call, iter(self._schedule.popleft, None))
        )
        self._refs = [slot.ref for slot in self.slots]
        self._runs: list[Run] = []
        self._entries: list[Callable[[], None]] = []
        self._tables: list[HookTable] = []
        self._num_hooks = 0
        self._num_more = 0  # arrivals that had no entry
        self._num_entries = 0
        self.stand_by()

    def lay_out(self) -> None:
        """Plan the runs, between passes: the slots have got their places in buckets."""
        self._runs = plan_runs(self.slots)
        self._entries = []
        for run in self._runs:
            self._entries += [_nothing] * (len(run.slots) - 1)
            self._entries.append(partial(self._call, run))
        self._tables = hook_tables([ref() for ref in self._refs])
        self._num_hooks = count_hooks(self._tables)

    # -- a pass ----------------------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """No pass is under way: one begins with the arrival of a parameter that has its own hook."""
        self._schedule.clear()
        self._schedule.append(self._on_more)
        self.is_open = False

    def begin(self, *, early: torch.Tensor | None = None, keep: bool = False) -> None:
        """A pass has begun; out of order if by an `early` arrival of one of these. With `keep` nothing is taken in."""
        # A hook that somebody has registered since would be called with gradients that are not taken in yet, and so see
        # something else than in other steps: the order counts as lost, and that parameter is not looked at in runs again.
        in_order = early is None and count_hooks(self._tables) == self._num_hooks
        self._schedule.clear()
        self.is_open = True
        self._num_more = 0 if early is None else 1
        self._num_entries = len(self._entries) if in_order and not keep else 0
        self._note_what_is_there(early)
        if keep:
            self._schedule.extend([_nothing] * len(self._entries))
        elif in_order:
            self._schedule.extend(self._entries)
        self._schedule.append(self._on_kept if keep else self._on_more)

    def _note_what_is_there(self, early: torch.Tensor | None) -> None:
        """What lies in ``.grad`` from before must not be taken for this pass's result."""
        for run in self._runs:
            run.taken = False
            run.before = None
        if not any(map(operator.is_not, gradients_of(self._refs), repeat(None))):
            return
        for run in self._runs:
            run.before = [
                (None, -1) if gradient is None or ref() is early else (gradient, gradient._version)
                for ref, gradient in zip(run.refs, run.gradients(), strict=True)
            ]

    def _call(self, run: Run) -> None:
        gradients = run.gradients()
        if run.all_arrived(gradients) and run.in_stream:
            run.taken = True
            self._take(run, gradients)  # type: ignore[arg-type]  # none of them is None
        else:
            self._lost()

    def _on_more(self) -> None:
        self._schedule.append(self._on_more)
        self._num_more += 1
        self._lost()

    def _on_kept(self) -> None:
        self._schedule.append(self._on_kept)

    @property
    def complete(self) -> bool:
        """Whether every run was taken in, and nothing came besides."""
        return self.is_open and not self._num_more and all(run.taken for run in self._runs)

    def finish(self) -> Rest:
        """Say of each parameter that no run took in whether it has come; the pass is over, or the order lost."""
        num_ticks = (
            self._num_entries - (len(self._schedule) - 1) + self._num_more if self._num_entries else self._num_more
        )
        arrived: list[ParameterSlot] = []
        absent: list[ParameterSlot] = []
        taken: list[ParameterSlot] = []
        for run in self._runs:
            if run.taken:
                taken += run.slots
                continue
            for place, (slot, gradient) in enumerate(zip(run.slots, run.gradients(), strict=True)):
                (arrived if run.has_arrived(place, gradient) else absent).append(slot)
        self.stand_by()
        return Rest(taken, arrived, absent, num_ticks - len(taken) - len(arrived))
