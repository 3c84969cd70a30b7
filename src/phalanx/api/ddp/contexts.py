"""The seam for backward passes that leave gradients elsewhere than in ``.grad``: in a context of distributed autograd.

What knows RPC is the compose layer's, which registers itself here. As long as no RPC agent runs, a forward pass asks one
C function, and that is all this costs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from phalanx.reducer.reducer import Reducer


class ContextGradients(Protocol):
    """Averages one module's gradients in contexts."""

    def watch(self) -> None:
        """Notice, from now on, a backward pass in a context. Local, and cheap to call again."""

    def forward_ended(self, context: int, output: Any, *, syncs: bool, divisor: int | None) -> Any:
        """A forward pass in a context is over; returns what to give the user. Collective where `syncs`."""

    def check_plain_pass(self) -> None:
        """A backward pass outside of any context has begun that no forward pass has announced: raise if one in a
        context did."""

    def shadow(self, *, divisor: int | None) -> None:
        """Take part in the others' pass with nothing. Collective."""

    def close(self) -> None:
        """Let the parameters go."""


class ContextProvider(Protocol):
    """What knows the foreign subsystem."""

    def in_use(self) -> bool: ...

    def current(self) -> int | None:
        """The id of the context that this thread is in."""

    def make(self, engine: Reducer, *, finds_unused: bool, withdraw: Callable[[], bool]) -> ContextGradients:
        """`withdraw`: whether a forward pass outside of any context waits for its backward; it then does no more."""


_provider: ContextProvider | None = None
_engines: weakref.WeakValueDictionary[str, Reducer] = weakref.WeakValueDictionary()
_ranks: dict[str, int] = {}


def register(provider: ContextProvider) -> None:
    global _provider
    _provider = provider


def in_use() -> bool:
    return _provider is not None and _provider.in_use()


def current() -> int | None:
    return None if _provider is None else _provider.current()


def make(engine: Reducer, *, finds_unused: bool, withdraw: Callable[[], bool]) -> ContextGradients:
    assert _provider is not None
    return _provider.make(engine, finds_unused=finds_unused, withdraw=withdraw)


def remember(engine: Reducer) -> None:
    """Let other ranks ask for this module by its key, which is the same on all of them."""
    _engines[key_of(engine)] = engine
    _ranks[key_of(engine)] = engine.group.rank


def key_of(engine: Reducer) -> str:
    return f"{engine.group.name}/{engine.label}"


def known_engine(key: str) -> tuple[int | None, Reducer | None]:
    """This process's rank in the group of the module, and its engine if that is still there."""
    return _ranks.get(key), _engines.get(key)
