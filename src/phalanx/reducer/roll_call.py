"""Roll call: most gradients are only noted down as they come, and looked at in runs.

Once passes have shown in which order gradients arrive, the hook of most parameters becomes one and the same object, which
appends the parameter to a list. The last of each run has a hook that looks: if those on the list are those of the run,
each once, they are taken in together. So nothing is assumed: who has come is known by itself, whatever else has changed. If
they are others, the order has changed: what has come by then is looked at one by one, and the parameters get hooks of
their own again, at once, until an order is known anew.

    first to come → `begin`, noted → noted, noted → last of run 0 (taken in) → … → end of the pass → `finish`

The hook that notes costs the least that a hook can: calling it is calling the list's `append`, by way of its class. Between
passes the class calls `_on_any` instead, so a pass does not go by unseen, whichever parameter it begins with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch

from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.grad_hooks import HookTable, count_hooks, hook_tables, registrations
from phalanx.reducer.runs import Run, plan_runs
from phalanx.reducer.streams import current_stream

Hook = Callable[[torch.Tensor], None]
_grad = operator.attrgetter("grad")


@dataclass(frozen=True)
class Rest:
    """What a pass has left to look at when it is over."""

    taken: list[ParameterSlot]
    """Those that runs have taken in."""
    arrived: list[ParameterSlot]
    absent: list[ParameterSlot]
    again: list[ParameterSlot]
    """Those that came once more, as often as they did."""


class RollCall:
    """Who has come in a pass, of those in `slots`.

    `first` is told of a parameter that comes while no pass is under way, or in `doubt`; it calls `begin` or `trust`, or
    says False where this parameter is none of ours any more. `take` gets a run of which all have come, with the parameters
    and their gradients. `lost` is called when the order is not kept to: it looks at what `finish` returns, and gives the
    parameters hooks of their own.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        *,
        first: Callable[[torch.Tensor], bool],
        take: Callable[[Run, list[torch.Tensor], list[torch.Tensor]], None],
        lost: Callable[[], None],
    ) -> None:
        self.slots = list(slots)
        self.is_open = False
        """Whether a pass is under way."""
        self._first = first
        self._take = take
        self._lost = lost
        self._here: list[torch.Tensor] = []  # who has come since a run was taken in
        self._gpu: torch.device | None = None
        self._home = 0  # there: the stream in which the pass under way has begun
        self._keeps = False
        self._in_graph = False
        self._asks = True  # `first`, before the next is noted
        self._runs: list[Run] = []
        self._num_left = 0  # runs that were not taken in yet
        self._ending_with: dict[int, Run] = {}  # by the parameter, of which there is none but those that are hooked
        self._tables: list[HookTable] = []
        self._num_hooks = 0
        self._num_registrations = -1
        # A class of its own: what an object does when it is called, its class says.
        self._ticks: Any = type("Tick", (), {"__slots__": ()})
        self.tick: Hook = self._ticks()
        """The hook of every parameter but the last of each run."""
        self.stand_by()

    def lay_out(self) -> None:
        """Plan the runs, between passes: the slots have got their places in buckets."""
        device = self.slots[0].bucket.spec.device  # of all of them
        self._gpu = device if device.type == "cuda" else None
        self._runs = plan_runs(self.slots)
        self._ending_with = {id(run.refs[-1]()): run for run in self._runs}
        self._tables = hook_tables([slot.ref() for slot in self.slots])
        self._num_hooks = count_hooks(self._tables)

    def forget_runs(self) -> None:
        """Between passes: there are no buckets until runs are laid out anew. Hooks still lead to these."""
        for run in self._runs:
            run.let_go()
        self._runs = []
        self._ending_with = {}

    def hooks(self) -> Iterator[tuple[ParameterSlot, Hook]]:
        """Which hook each parameter must have, by the runs as they are laid out."""
        for run in self._runs:
            for slot in run.slots[:-1]:
                yield slot, self.tick
            yield run.slots[-1], partial(self._on_last, run)

    # -- a pass ----------------------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """No pass is under way: one begins with the first parameter that comes."""
        self._here.clear()
        self.is_open = False
        self._asks = True
        self._ticks.__call__ = self._on_any

    def doubt(self) -> None:
        """Whether the pass under way goes on with the next that comes, or another begins, is for `first` to say."""
        self._asks = True
        self._ticks.__call__ = self._on_any

    def trust(self) -> None:
        """The pass under way goes on."""
        self._asks = False
        if not self._in_graph:
            self._ticks.__call__ = self._here.append

    def begin(self, *, keep: bool = False, in_graph: bool = False) -> bool:
        """A pass has begun; with `keep` nothing is taken in before its end. `in_graph` is one of compiled autograd, which
        must find what it can call, and not look into.

        False where the order counts as lost: a hook that somebody has registered since would be called with gradients that
        are not taken in yet, and so see something else than in other steps.
        """
        self._here.clear()
        if self._gpu is not None:
            self._home = current_stream(self._gpu)
        self.is_open = True
        self._keeps = keep or in_graph
        self._in_graph = in_graph
        for run in self._runs:
            run.taken = False
        self._num_left = len(self._runs)
        self._asks = False
        if not in_graph:
            self._ticks.__call__ = self._here.append
        now = registrations.next_id
        if now != self._num_registrations:  # of any hook, anywhere
            if count_hooks(self._tables) != self._num_hooks:
                return self._keeps
            self._num_registrations = now
        return True

    def _on_any(self, parameter: torch.Tensor) -> None:
        if not self._asks:
            self._here.append(parameter)
        elif self._first(parameter):
            self._on_first(parameter)

    def _on_first(self, parameter: torch.Tensor) -> None:
        """The pass goes on with this one, or has begun; the latter may have laid out the runs anew."""
        self._here.append(parameter)
        run = self._ending_with.get(id(parameter))
        if run is not None:
            self._look_at(run)

    def _on_last(self, run: Run, parameter: torch.Tensor) -> None:
        if self._asks:
            self._on_any(parameter)
        else:
            self._here.append(parameter)
            self._look_at(run)

    def _look_at(self, run: Run) -> None:
        """The last of a run has come."""
        if self._keeps:
            return
        # Another device's thread may note another's arrival at any time, behind what is looked at here.
        parameters = run.in_order(self._here[: len(run.refs)]) if run.in_stream(self._home) and not run.taken else None
        gradients = [] if parameters is None else list(map(_grad, parameters))
        if parameters is None or not all(map(operator.is_not, gradients, repeat(None))):
            self._lost()
            return
        del self._here[: len(parameters)]
        run.taken = True
        self._num_left -= 1
        self._take(run, parameters, gradients)

    def put_back(self, run: Run, parameters: list[torch.Tensor]) -> None:
        """A run could not be taken in as one: its parameters have come, and are to be looked at one by one."""
        run.taken = False
        self._num_left += 1
        self._here[:0] = parameters

    @property
    def complete(self) -> bool:
        """Whether every run was taken in, and nothing came besides."""
        return self.is_open and not self._here and not self._num_left

    def finish(self) -> Rest:
        """Say of each parameter that no run took in whether it has come; the pass is over, or the order lost."""
        taken = [slot for run in self._runs if run.taken for slot in run.slots]
        seen = {id(slot) for slot in taken}
        by_parameter = {id(slot.ref()): slot for slot in self.slots}
        arrived: list[ParameterSlot] = []
        again: list[ParameterSlot] = []
        for parameter in self._here:
            slot = by_parameter[id(parameter)]
            if parameter.grad is None and id(slot) not in seen:
                continue  # somebody has taken it away
            (again if id(slot) in seen else arrived).append(slot)
            seen.add(id(slot))
        absent = [slot for slot in self.slots if id(slot) not in seen]
        self.stand_by()
        return Rest(taken, arrived, absent, again)
