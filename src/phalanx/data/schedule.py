"""Which epoch an iteration of a sampler gets, and from where: the decision alone.

An iteration counts from its first draw, whether it is finished or left, and gets the epoch after that of the iteration
before it. Somebody who sets the epoch has taken over: from then on nothing advances by itself, as with torch's sampler.
A loaded place is where the next iteration goes on, unless an epoch other than the place's own is set before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.data.sampler_state import Place


@dataclass(frozen=True)
class Ticket:
    """What an iterator was made with: it keeps that if the epoch is set, or a place loaded, before its first draw."""

    serial: int
    place: Place


class Schedule:
    def __init__(self) -> None:
        self.epoch = 0
        self._is_told = False
        self._has_begun = False
        self._resume: Place | None = None
        self._serial = 0

    def tell(self, epoch: int) -> None:
        """The user sets the epoch. A place that was loaded for this very epoch stays where the next iteration begins."""
        self.epoch = epoch
        self._is_told, self._has_begun = True, False
        if self._resume is not None and self._resume.epoch != epoch:
            self._resume = None
        self._serial += 1

    def load(self, place: Place) -> None:
        # The place keeps the epoch of an iteration that is over: nothing is left of it for a user who sets it again.
        self.epoch = place.epoch + 1 if place.ended else place.epoch
        self._is_told, self._has_begun = False, False
        self._resume = place
        self._serial += 1

    def ticket(self) -> Ticket:
        return Ticket(self._serial, self._next())

    def is_void(self, ticket: Ticket) -> bool:
        return ticket.serial != self._serial

    def place_of(self, ticket: Ticket) -> Place:
        """Where an iterator would begin if it drew now."""
        return ticket.place if self.is_void(ticket) else self._next()

    def begin_at(self, place: Place) -> None:
        self.epoch = place.epoch
        self._has_begun, self._resume = True, None

    def place(self) -> Place:
        """Where the sampler stands while no iteration has begun since the epoch was set or a place loaded."""
        return self._resume or Place(self.epoch, 0)

    def _next(self) -> Place:
        epoch = self.epoch + 1 if self._has_begun and not self._is_told else self.epoch
        if self._resume is not None and self._resume.epoch == epoch:
            return Place(epoch, self._resume.position)
        return Place(epoch, 0)
