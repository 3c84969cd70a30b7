"""One iteration of a sampler: the epoch and share that it is bound to, and how far it is."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from phalanx.data.sampler_state import Place
from phalanx.data.schedule import Schedule
from phalanx.data.share import Share

# Indices become Python integers in pieces of this many: a list of a whole epoch takes five times the tensor's memory.
PIECE = 16384


class PassSource(Protocol):
    """What an iteration asks its sampler for."""

    _schedule: Schedule

    def _begin(self, began: EpochPass) -> Place: ...
    def _resume(self, began: EpochPass, state: Mapping[str, Any]) -> Place: ...
    def _share_from(self, position: int) -> Share: ...
    def _order_of(self, epoch: int) -> torch.Tensor | None: ...
    def _state_at(self, place: Place) -> dict[str, Any]: ...


class EpochPass:
    """Binds itself when the first index is drawn: an iterator that is made and dropped takes no epoch.

    Loaders do that: torchdata's makes up to four iterators of a sampler to resume from a state, and draws from one.
    """

    def __init__(self, source: PassSource) -> None:
        self._source = source
        self.ticket = source._schedule.ticket()
        self._bound: tuple[int, Share] | None = None
        self._num_handed = 0
        self._piece: Iterator[int] = iter(())
        self._num_used: int | None = None  # None where every index that was drawn counts as used
        self._is_drawn_out = False
        self._is_tracked = False
        self._is_over = False

    @property
    def bound(self) -> tuple[int, Share]:
        """The epoch, and this rank's share of it."""
        assert self._bound is not None, "nothing has been drawn from this pass"
        return self._bound

    @property
    def has_drawn(self) -> bool:
        return self._num_handed > 0 or self._is_drawn_out

    def bind(self, place: Place) -> None:
        self._bound = (place.epoch, self._source._share_from(place.position))

    def drawn_place(self) -> Place:
        """Where the epoch stands if every index drawn from this pass counts as used."""
        # How many of the present piece are left is known to its iterator, so drawing an index costs no bookkeeping.
        num_drawn = self._num_handed - operator.length_hint(self._piece)
        return self._place(num_drawn, is_over=self._is_drawn_out)

    def used_place(self) -> Place:
        """Where the epoch stands by what the user says was used, or by the draws where nothing was said."""
        if self._num_used is None:
            return self.drawn_place()
        is_used_up = self._is_drawn_out and self._num_used >= self.bound[1].count
        return self._place(self._num_used, is_over=self._is_over if self._is_tracked else is_used_up)

    def _place(self, num_used: int, *, is_over: bool) -> Place:
        if self._bound is None:
            return self._source._schedule.place_of(self.ticket)
        epoch, share = self._bound
        if is_over:
            return Place(epoch, share.length, ended=True)
        return Place(epoch, share.position_after(num_used))

    def count_used(self, num_samples: int) -> None:
        self._num_used = min((self._num_used or 0) + num_samples, self.bound[1].count)

    def track(self) -> None:
        """From here on `end` says when this pass is over: its last index is drawn before its last batch is used."""
        self._is_tracked = True
        self._num_used = self._num_used or 0

    def end(self) -> None:
        """The loop over this pass is over, whatever a loader has left of it."""
        self._is_over = True

    def __iter__(self) -> Iterator[Iterator[int]]:
        """The indices of this pass in pieces, each an iterator."""
        if self._bound is None:
            self.bind(self._source._begin(self))
        epoch, share = self.bound
        for part in share.parts(self._source._order_of(epoch), most=PIECE):
            self._piece = iter(part)
            self._num_handed += len(part)
            yield self._piece
        self._is_drawn_out = True


class EpochIterator(itertools.chain[int]):
    """What `iter(sampler)` returns. A `chain`, so that indices are handed on in C, at the speed of a list's iterator.

    torchdata's StatefulDataLoader saves and loads it together with each batch that it hands out, so here every index that
    was drawn counts: the loader keeps the states of batches that it has fetched ahead.
    """

    epoch_pass: EpochPass
    source: PassSource

    @classmethod
    def over(cls, source: PassSource) -> EpochIterator:
        epoch_pass = EpochPass(source)
        made = cls.from_iterable(epoch_pass)
        assert isinstance(made, EpochIterator)
        made.epoch_pass, made.source = epoch_pass, source
        return made

    def state_dict(self) -> dict[str, Any]:
        return self.source._state_at(self.epoch_pass.drawn_place())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a place that an iterator, or its sampler, had saved. This iterator has drawn nothing yet."""
        if self.epoch_pass.has_drawn:
            raise ValueError("this iterator has been drawn from: load the state into a new one, or into the sampler")
        self.epoch_pass.bind(self.source._resume(self.epoch_pass, state_dict))
