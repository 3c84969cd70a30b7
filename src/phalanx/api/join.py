"""`join`: train on data of which some ranks have less than others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.api import optimizer_watch
from phalanx.api.join_round import Round, WhenOut
from phalanx.api.replica import Replica, replica_of
from phalanx.api.state_copy import Stateful, copy_state
from phalanx.api.sync_batch_norm import problem_with, synchronized_layers
from phalanx.comm.coalesced import broadcast_coalesced

T = TypeVar("T")


def join(model: nn.Module, *more: nn.Module | Stateful, when_out: WhenOut = "shadow") -> Join:
    """Ranks may have unequally many batches: ``for batch in px.join(model, optimizer).over(loader)``.

    Every rank writes the same loop, with the same modules in the same order. `when_out` says what happens once a rank
    has no further batch:

    - ``"shadow"``: it takes part in the others' steps with weight zero until they are done. Averages are over the ranks
      that have data (or by `px.weight`). Afterwards it is given the others' parameters, buffers, and the state of what
      else is named here.
    - ``"stop"``: the loop ends on every rank, after the same batch.
    - ``"error"``: every rank raises `OutOfDataError`, which names the rank and the batch, after the same batch.

    Args:
        model: a module that `replicate` has seen.
        more: further replicated modules that the loop trains, and optimizers, schedulers or the like: what has a
            ``state_dict`` that changes with each step.
        when_out: see above; the same on all ranks.
    """
    if when_out not in get_args(WhenOut):
        raise ValueError(f"when_out must be one of {', '.join(get_args(WhenOut))}; got {when_out!r}")
    modules = [model, *(one for one in more if isinstance(one, nn.Module))]
    holders = [one for one in more if not isinstance(one, nn.Module)]
    for holder in holders:
        if not isinstance(holder, Stateful):
            raise TypeError(
                "px.join takes replicated modules, and optimizers and the like, which have state_dict and "
                f"load_state_dict; got {type(holder).__name__}"
            )
    for module in modules:
        if isinstance(module, TorchDDP):
            raise TypeError(
                f"{type(module).__name__} has a join() of its own, torch's: write `with model.join():`, or pass it to "
                "torch.distributed.algorithms.Join"
            )
    return Join(modules, holders, when_out)


class Join:
    """What `join` returns: iterate `over` a loader; or use it as a context around any loop of your own."""

    def __init__(self, modules: list[nn.Module], holders: list[Stateful], when_out: WhenOut) -> None:
        self._modules = modules
        self._holders = holders
        self._when_out: WhenOut = when_out
        self._replicas: list[Replica] = [replica_of(module) for module in modules]
        if len(set(map(id, modules))) < len(modules):
            raise ValueError("px.join was given a module twice: name each once")
        ranks = {tuple(torch.distributed.get_process_group_ranks(r.group.process_group)) for r in self._replicas}  # type: ignore[attr-defined]
        if len(ranks) > 1:
            raise ValueError(f"px.join needs modules that are replicated over the same ranks; got {sorted(ranks)}")
        self._round: Round | None = None
        self._entered = False

    def over(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, as long as `when_out` says. The loader is read one batch ahead.

        Collective: every rank iterates, also one whose loader is empty. Leave the loop early (``break``) on all ranks
        after the same batch. Where a rank may have run out by then, iterate in a block, ``with px.join(…) as joined:
        for batch in joined.over(loader)``, whose end tells it; a rank that may leave alone needs a loop of its own in
        the block, ``with px.join(…): for batch in loader``.
        """
        if self._round is not None and not self._round.over and self._round.num_batches:
            raise RuntimeError("px.join is already in a loop: let it end first, or call px.join again")
        if self._round is not None:
            self._round.close()
        rounds = self._round = self._new_round(known=True)
        try:
            iterator = iter(loader)
            batch, has_batch = _next(iterator)
        except Exception as error:
            rounds.begin(has_batch=False, problem=f"the loader raised {type(error).__name__}: {error}")
            raise
        try:
            if not rounds.begin(has_batch=has_batch, problem=self._problem(known=True)):
                return
            while has_batch:
                following, has_next = _next(iterator)
                rounds.begin_batch(last=not has_next)
                yield batch  # type: ignore[misc]
                if rounds.end_batch():
                    return
                batch, has_batch = following, has_next
            rounds.finish()
            self._copy(rounds)
        except GeneratorExit:
            if not self._entered:
                rounds.leave(None)
            raise
        except BaseException as error:
            rounds.leave(error)
            raise

    def __enter__(self) -> Join:
        if self._entered:
            raise RuntimeError("this px.join is already entered")
        self._round = self._new_round(known=False)
        self._round.begin(has_batch=True, problem=self._problem(known=False))
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = False
        rounds, self._round = self._round, None
        assert rounds is not None
        if error is not None:
            rounds.leave(error)
        elif not rounds.over:
            rounds.finish()
            self._copy(rounds)

    def _new_round(self, *, known: bool) -> Round:
        names = [type(module).__name__ for module in self._modules]
        layers = synchronized_layers(self._modules)
        return Round(self._replicas, self._when_out, layers, names=names, known=known)

    def _problem(self, *, known: bool) -> str | None:
        """What keeps this rank from joining."""
        for module, replica in zip(self._modules, self._replicas, strict=True):
            if replica.reducer.before_step is not None:
                return f"{type(module).__name__} is already in a px.join: end that loop first"
            if self._when_out == "stop" or (self._when_out == "error" and known):
                continue  # no rank ever has to shadow another
            problem = problem_with(synchronized_layers([module]), replica.group.process_group)  # type: ignore[attr-defined]
            if problem is not None:
                return f'{problem}, or choose px.join(…, when_out="stop")'
        return None

    def _copy(self, rounds: Round) -> None:
        """Ranks that had no data for a while have missed updates: they get the state of one that missed none."""
        source = rounds.source
        if source is None:
            return
        for module, replica in zip(self._modules, self._replicas, strict=True):
            broadcast_coalesced(replica.group, replica.state(module), source=source)
        device = self._replicas[0].reducer.buckets[0].spec.device
        copy_state(self._replicas[0].group, self._holders, source=source, device=device)
        self._warn_of_optimizers()

    def _warn_of_optimizers(self) -> None:
        held = set(map(id, self._holders))
        missing = [
            type(optimizer).__name__
            for replica in self._replicas
            for optimizer in optimizer_watch.optimizers_of(replica)
            if id(optimizer) not in held and any(optimizer.state.values())
        ]
        if missing:
            warnings.warn(
                f"ranks ran out of data at different times, and the state of {', '.join(missing)} (momentum and the like) "
                "now differs between them: the ranks would drift apart. Give it to px.join, as in "
                "px.join(model, optimizer)",
                stacklevel=4,
            )


def _next(iterator: Iterator[T]) -> tuple[T | None, bool]:
    try:
        return next(iterator), True
    except StopIteration:
        return None, False
