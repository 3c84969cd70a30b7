"""`ranks` and `run_ranks`: run a function in N real ranks."""

from __future__ import annotations

import functools
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from phalanx.testing import body as bodies
from phalanx.testing import client, wire
from phalanx.testing.verdict import judge, output_of

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RankOptions:
    """How a body is run. `allow_leaks` is the reason why what it leaves behind is not looked at."""

    world_size: int
    backend: str | None = "gloo"
    timeout_s: float = 30.0
    grace_s: float = 2.0
    expect_exit: Mapping[int, int] = field(default_factory=dict)
    allow_leaks: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        if self.timeout_s <= 0 or self.grace_s < 0:
            raise ValueError(f"timeout_s and grace_s are seconds, got {self.timeout_s} and {self.grace_s}")
        if not isinstance(self.allow_leaks, str):
            raise TypeError("allow_leaks is a sentence that says why this body may leave something behind")
        if outside := [rank for rank in self.expect_exit if not 0 <= rank < self.world_size]:
            raise ValueError(f"expect_exit names ranks {outside} of a world of {self.world_size}")


def ranks(
    world_size: int,
    *,
    backend: str | None = "gloo",
    timeout_s: float = 30.0,
    grace_s: float = 2.0,
    expect_exit: Mapping[int, int] | None = None,
    allow_leaks: str = "",
) -> Callable[[Callable[P, T]], Callable[P, None]]:
    """Run the decorated test in `world_size` real ranks.

    Every rank runs the whole body, in a fresh process with one torch thread, the environment of a launcher (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and a default process group of the given backend (`None`: no
    group; the body makes its own). Arguments, from fixtures or `parametrize`, are pickled: each rank gets a copy.

    The test fails when any rank raises, ends early, is not done after `timeout_s` (all stacks are shown), or leaves
    processes, threads, open descriptors, socket files or shared memory behind once its process group is destroyed. When
    one rank fails the others have `grace_s` to fail too. The test is skipped when every rank skips.

    `expect_exit={1: -9}` says that rank 1 must end with that code (negative: by that signal) instead of returning;
    `allow_leaks="why"` turns the search for leaks off, for tests that kill ranks.
    """
    options = RankOptions(world_size, backend, timeout_s, grace_s, dict(expect_exit or {}), allow_leaks)

    def decorate(body: Callable[P, T]) -> Callable[P, None]:
        @functools.wraps(body)
        def in_ranks(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True
            _run(body, options, args, kwargs)

        in_ranks.__dict__["phalanx_ranks"] = options
        return in_ranks

    return decorate


def run_ranks(
    body: Callable[..., T],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout_s: float = 30.0,
    grace_s: float = 2.0,
    expect_exit: Mapping[int, int] | None = None,
    allow_leaks: str = "",
    **kwargs: Any,
) -> list[T | None]:
    """Call `body(*args, **kwargs)` in `world_size` ranks, as `ranks` does, and return what each rank returned.

    A rank that was expected to exit gives `None`. Raises `RanksFailed` where a test would fail.
    """
    __tracebackhide__ = True
    options = RankOptions(world_size, backend, timeout_s, grace_s, dict(expect_exit or {}), allow_leaks)
    return _run(body, options, args, kwargs)


def _run(body: Callable[..., T], options: RankOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[T | None]:
    __tracebackhide__ = True
    request = wire.RunRequest(
        world_size=options.world_size,
        backend=options.backend,
        timeout_s=options.timeout_s,
        grace_s=options.grace_s,
        check_leaks=not options.allow_leaks,
        expect_exit=dict(options.expect_exit),
        payload=bodies.encode(body, args, kwargs),
        env=dict(os.environ),
        sys_path=[os.path.abspath(entry) for entry in sys.path],
        cwd=os.getcwd(),
        preload=client.preloadable(),
    )
    result = client.ask(request)
    judge(request, result, getattr(body, "__name__", repr(body)))
    for outcome in result.outcomes:
        if shown := output_of(outcome):
            print(shown)  # pytest keeps it, and shows it where it shows a passing test's output
    return [pickle.loads(o.report.value) if o.report is not None else None for o in result.outcomes]
