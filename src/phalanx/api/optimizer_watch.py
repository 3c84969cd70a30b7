"""The last place where a missing synchronisation can be noticed: an optimizer that is about to step.

A rank whose loss did not reach the module at all runs no hook, yet the other ranks wait for it. When its optimizer
steps, it takes part with zeros. And gradients that no reduction has seen, outside of `no_sync`, are an error: the ranks'
parameters would drift apart with nothing to show for it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

from torch.nn import Parameter
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from phalanx.errors import UnsynchronizedStepError
from phalanx.optim.in_backward import is_stepped_in_backward
from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.options import Placement
from phalanx.reducer.reducer import Reducer
from phalanx.reducer.spread import part_of

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """What is watched: a reducer, and whether a pass that began now would synchronise."""

    reducer: Reducer

    def parameters(self) -> list[Parameter]: ...

    def has_changed(self) -> bool: ...

    def takes_part(self) -> bool: ...


class _Seen(NamedTuple):
    """What there was of a reducer's work when an optimizer last stepped."""

    steps: int
    kept: int


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_by_optimizer: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()
# Per optimizer, since two may share a module and each must find that the step was synchronised; and by any of them.
_seen: weakref.WeakKeyDictionary[Optimizer, weakref.WeakKeyDictionary[Any, _Seen]] = weakref.WeakKeyDictionary()
_seen_by_any: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
_remove_hook: Callable[[], None] | None = None


def watch(replica: Watched) -> None:
    """From now on look at each step of an optimizer that holds parameters of this replica."""
    global _remove_hook
    _watched.add(replica)
    forget_optimizers()
    if _remove_hook is None:
        _remove_hook = register_optimizer_step_pre_hook(_before_step).remove


def watched() -> list[Any]:
    """All replicas there are: also those whose module was only a container for the call and is gone."""
    return list(_watched)


def unwatch(replica: Watched) -> None:
    _watched.discard(replica)
    forget_optimizers()


def optimizers_of(replica: Watched) -> list[Optimizer]:
    """Those that have stepped, of a replica's parameters."""
    return [optimizer for optimizer, replicas in _seen.items() if replica in replicas]


def forget_optimizers() -> None:
    """Which optimizer holds whose parameters is looked up anew: parameters were replaced, or replicas came or went."""
    _by_optimizer.clear()


def _replicas_of(optimizer: Optimizer) -> list[weakref.ref[Any]]:
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _by_optimizer.get(optimizer)
    if known is None or known[0] != size:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [
            weakref.ref(replica)
            for replica in _watched
            if any(id(parameter) in held for parameter in replica.parameters())
        ]
        known = _by_optimizer[optimizer] = (size, found)
    return known[1]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(callable(given) for given in (*args[1:], *kwargs.values())):
        return  # a closure: the backward passes of this step are still to come
    if is_stepped_in_backward(optimizer):
        return  # backward has averaged, or the step is about to be refused
    for reference in _replicas_of(optimizer):
        replica = reference()
        if replica is None or replica.reducer.group.size == 1:
            continue
        replica.reducer.abandon_stale()
        stats = replica.reducer.stats
        seen = _seen.setdefault(optimizer, weakref.WeakKeyDictionary())
        last = seen.get(replica) or _before_first_step(optimizer, replica)
        if last == (stats.steps, stats.kept):
            _take_part(replica, optimizer)
        elif last.kept != stats.kept:
            _refuse_kept(replica)
        seen[replica] = _seen_by_any[replica] = _Seen(stats.steps, stats.kept)


def _before_first_step(optimizer: Optimizer, replica: Watched) -> _Seen:
    """An optimizer that has not stepped yet: it comes to an average that is there, or everyone awaits a new one.

    One made for parameters that replaced all that were averaged finds neither: no pass over those was noticed.
    """
    if replica.has_changed():
        return _Seen(replica.reducer.stats.steps, replica.reducer.stats.kept)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for slot in replica.reducer.slots:
        parameter = slot.ref()
        if parameter is not None and id(parameter) in held and parameter.grad is slot.shown:
            return _Seen(-1, -1)
    return _seen_by_any.get(replica, _Seen(0, 0))


def _refuse_kept(replica: Watched) -> None:
    """Gradients that `no_sync` kept for a later pass, which has not come: outside of it nobody can mean to step on them."""
    reducer = replica.reducer
    if not replica.takes_part() or reducer.options.placement is not Placement.OWNED:
        return  # inside of `no_sync` a step on this rank's own gradients is meant; torch's contract allows it anywhere
    kept = [slot.name for slot in reducer.slots if slot.dirty and getattr(slot.ref(), "grad", None) is not None]
    if kept:
        _refuse(
            reducer,
            kept,
            "they were kept by backward passes in phalanx.no_sync, and no pass after that has averaged them. Run the last "
            "pass before the step outside of no_sync, or call phalanx.synchronize, or use phalanx.accumulate, which "
            "averages a shorter last group, too; to step on this rank's own gradients, step within no_sync",
        )


def _refuse(reducer: Reducer, names: list[str], why: str) -> NoReturn:
    error = UnsynchronizedStepError(
        f"the optimizer is about to step on gradients that were never averaged ({len(names)} parameters): {why}",
        rank=reducer.group.rank,
        step=reducer.step,
        parameters=names,
    )
    reducer.group.post_failure(reducer.topic, str(error))  # the others may be waiting for this rank's part
    raise error


def _take_part(replica: Watched, optimizer: Optimizer) -> None:
    """No pass of this rank has synchronised since the last step. Nothing was computed: zeros. Something was: an error."""
    reducer = replica.reducer
    if not replica.takes_part() or _is_replayed(reducer):
        return
    # Under torch's contract whatever lies in .grad counts, whoever put it there.
    owned = reducer.options.placement is Placement.OWNED
    unseen = [slot.name for slot in reducer.slots if owned and not _is_reduced(slot)]
    if unseen and _changes_nothing(optimizer):
        return
    if unseen:
        _refuse(
            reducer,
            unseen,
            "they did not come from a backward pass that Phalanx saw. Let backward() compute them, or call "
            "phalanx.synchronize before the step, or put it into phalanx.no_sync",
        )
    logger.info(
        "rank %d computed no gradient of %s in this step and takes part with zeros. If gradients are read before the "
        "optimizer's step (clipping, a GradScaler), call phalanx.synchronize first",
        reducer.group.rank,
        reducer.name,
    )
    reducer.synchronize()


def _is_replayed(reducer: Reducer) -> bool:
    """Whether the gradients may be those of a CUDA graph's replay: it averages them, and nothing here is told of it."""
    captured = reducer.layout.control.is_captured
    return captured and all(getattr(slot.ref(), "grad", None) is slot.shown for slot in reducer.slots)


def _changes_nothing(optimizer: Optimizer) -> bool:
    """Whether this step is one that only makes an optimizer's state, as torch.distributed.checkpoint does to load one."""
    groups = optimizer.param_groups
    return all(float(group.get("lr", 1.0)) == 0.0 for group in groups) and not any(
        bool(part_of(parameter.grad).any())
        for group in groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _is_reduced(slot: ParameterSlot) -> bool:
    """Whether there is no gradient here but one that a reduction left: kept by the user, and the same everywhere."""
    gradient = getattr(slot.ref(), "grad", None)
    return gradient is None or gradient is slot.shown
