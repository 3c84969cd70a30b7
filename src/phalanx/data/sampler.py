"""`phalanx.DistributedSampler`: torch's, which also advances by itself, resumes anywhere, and can leave out padding."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from phalanx.data.epoch_pass import EpochIterator, EpochPass
from phalanx.data.sampler_state import OrderOptions, Place, from_state, to_state
from phalanx.data.schedule import Schedule
from phalanx.data.share import Share, Tail, epoch_order

Batch = TypeVar("Batch")


class DistributedSampler(TorchDistributedSampler[int]):
    """Each rank's share of a dataset, in the order of torch's sampler, with torch's arguments.

    Every rank makes one with the same dataset length and options, and iterates over it as often as the others.

    - Without `set_epoch`, each iteration is the next epoch. It counts from its first draw, finished or not, so ranks must
      begin alike: to look at a batch on one rank, use another sampler. Once `set_epoch` is called, the epoch changes by
      `set_epoch` alone.
    - `state_dict` is a few numbers, the same on every rank (with ``pad=False`` rank 0's holds). Any world size goes on
      from it, in mid-epoch, at once: every sample of the epoch is used exactly once, but for what is padded or dropped at
      its very end.
    - ``pad=False`` repeats nothing to even out the ranks: some get one sample more. For evaluation; see `gather_exact`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        self._schedule = Schedule()
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._schedule = Schedule()  # torch's constructor set an epoch, which is not the user's doing
        if drop_last and not pad:
            raise ValueError("drop_last=True drops what is left at the end and pad=False keeps it: choose one of them")
        self.pad = pad
        self._length = len(dataset)  # type: ignore[arg-type]
        self._current: EpochPass | None = None
        if not pad:
            self.num_samples = self._share_from(0).count
            self.total_size = self._length

    # -- epochs --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one where none has begun since the epoch was set."""
        return self._schedule.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """The next iterations are of this epoch, until it is set again. Iterators that there are keep theirs."""
        self._schedule.tell(epoch)
        self._current = None

    def __iter__(self) -> Iterator[int]:
        return EpochIterator.over(self)

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch; an iteration that goes on from a state has fewer."""
        return self.num_samples

    # -- where it stands -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, as plain numbers. Take it after a step; the batch in hand counts as used.

        With a DataLoader that has workers, indices are drawn long before their batch is used: iterate over
        `track(loader)`, or call `advance`, so that the used ones are counted instead of the drawn ones.
        """
        return self._state_at(self._schedule.place() if self._current is None else self._current.used_place())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was taken, with this sampler's rank and num_replicas. Every rank loads the same state.

        The next iteration has the rest of that epoch. ValueError if the state is of another order: dataset length, seed,
        shuffle, drop_last or pad.
        """
        self._schedule.load(from_state(self._options(), state_dict))
        self._current = None

    def advance(self, num_samples: int) -> None:
        """Say that this rank has used so many more samples of the iteration under way.

        From the first call in an iteration on, its state is where these calls lead, not where indices were drawn to.
        """
        if operator.index(num_samples) < 0:
            raise ValueError(f"the number of samples used must not be negative, got {num_samples}")
        if self._current is None:
            raise ValueError("no iteration is under way: advance() counts what was used of one that has begun")
        self._current.count_used(num_samples)

    def track(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over a DataLoader of this sampler, and count each batch as used when it is handed out.

        Needs a loader with batches of one size (the last may be smaller); for others call `advance` yourself.
        """
        return self._tracked(loader, self._batch_size_of(loader))

    def _tracked(self, loader: Iterable[Batch], batch_size: int) -> Iterator[Batch]:
        began: EpochPass | None = None
        for batch in loader:
            if began is None:
                began = self._tracked_pass()
            began.count_used(batch_size)
            yield batch
        (began or self._tracked_pass()).end()

    def _tracked_pass(self) -> EpochPass:
        """The pass that the loader has just drawn its first index of, or ended at once."""
        assert self._current is not None
        self._current.track()
        return self._current

    def _batch_size_of(self, loader: object) -> int:
        batches = getattr(loader, "batch_sampler", None)
        if self not in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
            raise ValueError(
                f"track() needs a DataLoader made with this sampler, got {type(loader).__name__} with sampler "
                f"{type(getattr(loader, 'sampler', None)).__name__}"
            )
        if batches is None:
            return 1  # a loader without automatic batching hands out single samples
        size = getattr(batches, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError(
                f"{type(batches).__name__} has no batch_size, so what it hands out cannot be counted: "
                "iterate over the loader itself and call advance(number of samples) for each batch"
            )
        return size

    # -- what an iteration asks for ------------------------------------------------------------------------------

    def _begin(self, began: EpochPass) -> Place:
        place = self._schedule.place_of(began.ticket)
        if not self._schedule.is_void(began.ticket):
            self._schedule.begin_at(place)
        self._current = began
        return place

    def _resume(self, began: EpochPass, state: Mapping[str, Any]) -> Place:
        place = from_state(self._options(), state)
        self._schedule.load(place)
        self._schedule.begin_at(place)
        self._current = began
        return place

    def _share_from(self, position: int) -> Share:
        tail: Tail = "drop" if self.drop_last else "pad" if self.pad else "keep"
        return Share(self._length, position, self.num_replicas, self.rank, tail)

    def _order_of(self, epoch: int) -> torch.Tensor | None:
        present = len(self.dataset)  # type: ignore[arg-type]
        if present != self._length:
            raise ValueError(
                f"the dataset had {self._length} samples when the sampler was made and has {present} now: "
                "make a new sampler when the dataset changes"
            )
        return epoch_order(self._length, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _state_at(self, place: Place) -> dict[str, Any]:
        return to_state(self._options(), place)

    def _options(self) -> OrderOptions:
        return OrderOptions(self._length, self.seed, self.shuffle, self.drop_last, self.pad)

    def indices(self) -> torch.Tensor:
        """The dataset's indices of this rank in the iteration under way or the last one, in the order drawn."""
        if self._current is None:
            raise ValueError(
                "the sampler has not been iterated over since it was made, its epoch set or a state loaded"
            )
        epoch, share = self._current.bound
        return share.indices(self._order_of(epoch))
