"""Our classes where torch's are looked up, so that code which asks for torch's runs on Phalanx without an edit.

Two things are put in place for `DistributedDataParallel`, because one of them is not enough:

- the *names* `torch.nn.parallel.DistributedDataParallel` and `torch.nn.parallel.distributed.DistributedDataParallel`, for
  code that looks the class up when it needs it, and for classes that will be derived from it;
- the *constructor* of torch's class, for code that took hold of the class before (`from torch.nn.parallel import
  DistributedDataParallel as DDP`, a closure, a default argument, a base class). What it constructs is given our class.
  So nobody's module has to be searched and edited, and a name that was imported early still means torch's class, of
  which every instance of ours is one: `isinstance` holds with the old name and with the new one.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.nn.parallel.distributed
import torch.utils.data.distributed
from torch import nn

from phalanx.api.ddp import DistributedDataParallel
from phalanx.api.ddp.pickling import new

# Taken from our class: by the time this is imported the name in torch may be somebody else's.
TORCH_DDP: type[Any] = DistributedDataParallel.__bases__[-1]

_HOLDERS: dict[str, tuple[Any, ...]] = {
    "DistributedDataParallel": (torch.nn.parallel, torch.nn.parallel.distributed),
    "SyncBatchNorm": (torch.nn, torch.nn.modules),
    "DistributedSampler": (torch.utils.data, torch.utils.data.distributed),
}
_lock = threading.RLock()
_placed: dict[tuple[int, str], _Place] = {}
_made: dict[type[Any], type[Any]] = {}


@dataclass(frozen=True)
class _Place:
    """One attribute of torch's: what was there, and what we put there."""

    holder: Any
    name: str
    before: Any
    after: Any


class Swap:
    """What one call of `swap_ddp` has put in place. `undo`, or leaving it as a context, puts back that and no more.

    Models that were wrapped in between stay as they are: ours, and instances of torch's class too.
    """

    def __init__(self, places: tuple[_Place, ...]) -> None:
        self._places = places

    def undo(self) -> None:
        """Put torch's back. Safe to call twice."""
        with _lock:
            places, self._places = self._places, ()
            for place in reversed(places):
                _placed.pop((id(place.holder), place.name), None)
                if getattr(place.holder, place.name) is place.after:
                    setattr(place.holder, place.name, place.before)
                else:
                    warnings.warn(
                        f"{place.holder.__name__}.{place.name} was replaced again after phalanx.swap_ddp(); "
                        "it is left as it is",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def swap_ddp(*, sync_batchnorm: bool = False, sampler: bool = False) -> Swap:
    """Let everything in this process that asks for torch's DistributedDataParallel get Phalanx's.

    Call it on every rank, before the first model is wrapped; calling again changes nothing. The result may be used as a
    context (``with px.swap_ddp(): …``) or undone by ``.undo()``. `sync_batchnorm` and `sampler` put our `SyncBatchNorm`
    and `DistributedSampler` in the place of torch's too, under their names in `torch.nn` and `torch.utils.data`. They are
    off by default: a program that did not ask for other layers or another order of its data should not get them.
    """
    wanted = ["DistributedDataParallel"]
    wanted += ["SyncBatchNorm"] if sync_batchnorm else []
    wanted += ["DistributedSampler"] if sampler else []
    with _lock:
        todo = [place for place in _places_for(wanted) if (id(place.holder), place.name) not in _placed]
        for place in todo:
            _check_is_torchs(place)
        if any(place.holder is TORCH_DDP for place in todo):
            _check_nothing_is_wrapped()
        for place in todo:
            setattr(place.holder, place.name, place.after)
            _placed[id(place.holder), place.name] = place
    return Swap(tuple(todo))


def _places_for(names: list[str]) -> Iterator[_Place]:
    for name in names:
        # Of the package itself, which has loaded whatever it offers by now: not every version has all three.
        ours = getattr(sys.modules["phalanx"], name, None)
        if ours is None:
            raise ValueError(f"this version of phalanx has no {name} to put in the place of torch's")
        for holder in _HOLDERS[name]:
            yield _Place(holder, name, getattr(holder, name), ours)
        if name == "DistributedDataParallel":
            yield _Place(TORCH_DDP, "__init__", TORCH_DDP.__init__, _constructor())


def _check_is_torchs(place: _Place) -> None:
    found = place.before
    if not str(getattr(found, "__module__", "")).startswith("torch."):
        raise ValueError(
            f"{place.holder.__name__}.{place.name} is not torch's but {found!r}, which somebody put there before: "
            "call phalanx.swap_ddp() first, or undo the other replacement"
        )


def _check_nothing_is_wrapped() -> None:
    """A model that torch has wrapped would go on with torch's reducer, and fail `isinstance` with the new name."""
    if not _wrapped_by_torch():
        return
    gc.collect()  # it may be gone already, and only not collected
    if wrapped := _wrapped_by_torch():
        inner = type(getattr(wrapped[0], "module", None)).__name__
        raise ValueError(
            f"{len(wrapped)} model(s) are wrapped in torch's DistributedDataParallel already (the first is a {inner}), and "
            "would go on with torch's: call phalanx.swap_ddp() before the first model is wrapped, best at the top of the "
            "script, or run it by `python -m phalanx.swap_ddp`"
        )


def _wrapped_by_torch() -> list[nn.Module]:
    kinds = {kind for kind in _and_derived(TORCH_DDP) if not issubclass(kind, DistributedDataParallel)}
    found = [candidate for candidate in gc.get_objects() if type(candidate) in kinds]
    return [model for model in found if "module" in vars(model).get("_modules", ())]  # not one whose constructor raised


def _and_derived(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _and_derived(derived)


@functools.cache
def _constructor() -> Any:
    """What stands for torch's `__init__` while the swap lasts."""

    @functools.wraps(TORCH_DDP.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "__class__", ours_for(type(self)))
        DistributedDataParallel.__init__(self, *args, **kwargs)

    return construct


def ours_for(kind: type[Any]) -> type[Any]:
    """Our class, in the place of torch's or of a class derived from torch's.

    A derived class keeps its methods: the one made here inherits from it first and from ours second, so that its
    `super()` finds our methods where it found torch's. It goes by the same name.
    """
    if issubclass(kind, DistributedDataParallel):
        return kind
    if kind is TORCH_DDP:
        return DistributedDataParallel
    if kind not in _made:
        _made[kind] = _derived_from_both(kind)
    return _made[kind]


def _derived_from_both(kind: type[Any]) -> type[Any]:
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
    try:
        metaclass: Any = type(kind)
        made: type[Any] = metaclass(kind.__name__, (kind, DistributedDataParallel), body)
    except TypeError as error:
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} is derived from torch's DistributedDataParallel in a way that "
            f"Phalanx's cannot take part in ({error}); derive it from phalanx.DistributedDataParallel"
        ) from error
    return made


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickled as the class that it stands for, which can be imported, and made ours again when it is loaded."""
    return (_new_for, (type(self).__bases__[0],), *DistributedDataParallel.__reduce_ex__(self, protocol)[2:])


def _new_for(kind: type) -> Any:
    return new(ours_for(kind))
