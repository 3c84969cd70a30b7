"""When a gradient is there and when a backward pass is over: the only file that touches autograd's hooks.

A gradient is there when autograd has accumulated it into ``.grad`` (a post-accumulate hook). That a *pass* is over is
harder. A callback queued on the engine runs at the end of the graph task in which it was queued. Under reentrant
checkpointing that is an inner pass, run by a node of the outer one; the outer node is then current, and a hook on it
can queue the callback again, one level further out, until no node is current: that is the root.

Nor does a pass always end. If it raises, the engine drops the callback uncalled, and that is how it is noticed: the
callback is an object, and its end without a call is the end of the pass. One gap is left: between the end of an inner
pass and the hook on the outer node nothing is queued. If the outer pass raises there, it is noticed when the graph is
freed, when an optimizer steps, or by the next pass, which is not nested as deep.

On a GPU backward runs in a thread of the engine's, and it may be that thread which drops the callback, a moment after the
exception has come to whoever called backward. `await_broken` waits for it, before ranks do something else together. A pass
that went well it may hold for a moment longer, too, and with it our callback: `_await_engine` waits for that at exit.

A pass of compiled autograd is one function, which calls the hooks. The engine then drops its callbacks uncalled in any
case; the compose layer says that the function has come to its end (`compiled_pass_ended`), before they are dropped.
"""

from __future__ import annotations

import atexit
import operator
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable, graph
from torch.utils.hooks import RemovableHandle

HookTable = weakref.ref[Sized]
current_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The engine's number for the pass that runs in this thread; -1 outside of any."""

registrations = RemovableHandle
"""Its ``next_id`` grows whenever a hook is registered, of whatever kind: while it does not, there is none that is new."""


@dataclass
class Compiler:
    """What is to be known of torch.compile, filled in by what knows it."""

    in_pass: Callable[[], bool]
    """Whether the hooks of this pass are called by compiled autograd."""
    prepare: Callable[[torch.Tensor, Callable[..., Any]], None]
    """Told of every parameter's hook before it is registered: such a pass must call it and not look into it."""


compiler = Compiler(in_pass=lambda: False, prepare=lambda parameter, hook: None)
BROKEN_WITHIN_S = 5.0  # what it waits for is under way; only somebody who holds on to the graph can keep it for longer
ENDS_WITHIN_S = 0.5
PAUSE_S = 0.0002
compiled_pass_open = False
"""Whether somebody waits for the end of a pass of compiled autograd."""
_compiled_ends: list[weakref.ref[_End]] = []


class BackwardPasses:
    """Tells when the backward pass in which gradients arrive ends, or breaks off."""

    def __init__(
        self,
        *,
        on_end: Callable[[], None],
        on_broken: Callable[[], None],
        on_inner_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_end = on_end
        self._on_broken = on_broken
        self._on_inner_end = on_inner_end
        self._queued: set[int] = set()
        self._settled = 0  # how many steps were settled: what belongs to an earlier one means nothing any more
        self._inner_depth: int | None = None  # of the inner pass that ended, while its outer node has yet to end
        self._breaking: int | None = None  # the thread that is telling of a pass that broke off

    def enter(self) -> None:
        """Call from a gradient's hook, at least once per pass."""
        number = current_pass()
        if number not in self._queued:
            self._queued.add(number)
            end = _End(self, number)
            _queue(end)  # the engine alone keeps it, so that its end is the engine's doing
            if compiler.in_pass():
                _await_compiled(end)

    def forget(self) -> None:
        """The step is settled: what is still queued means nothing any more."""
        self._queued.clear()
        self._settled += 1
        self._inner_depth = None

    def is_stale(self) -> bool:
        """Whether the pass that runs is not part of the one under way, which must then have been broken off.

        It can be so only after an inner pass has ended: `on_inner_end` is called then.
        """
        return self._inner_depth is not None and _depth() < self._inner_depth

    def _ended(self, number: int) -> None:
        self._queued.discard(number)
        node = torch._C._current_autograd_node()
        if node is None:
            self._on_end()
        else:
            self._inner_depth = _depth()
            self._on_inner_end()
            _Outer(self, node, self._settled)

    def _broke(self, number: int) -> None:
        if number in self._queued:
            self._breaking = threading.get_ident()
            try:
                self._queued.discard(number)
                self._on_broken()
            finally:
                self._breaking = None

    def await_broken(self) -> None:
        """Outside of any pass: if one has broken off, return when `on_broken` was called and is over."""
        if not self._queued and self._breaking is None:
            return
        if current_pass() != -1 or self._breaking == threading.get_ident() or _is_any_running():
            return
        waits_until = time.monotonic() + BROKEN_WITHIN_S
        while (self._queued or self._breaking is not None) and time.monotonic() < waits_until:
            time.sleep(PAUSE_S)  # lets the other thread have the interpreter


class _End:
    """Queued on the engine. Called: the pass ended. Dropped without a call: it raised."""

    def __init__(self, passes: BackwardPasses, number: int) -> None:
        self._passes: BackwardPasses | None = passes
        self._number = number

    def __call__(self) -> None:
        passes, self._passes = self._passes, None
        if passes is not None:
            passes._ended(self._number)

    def __del__(self) -> None:
        if self._passes is not None:
            self._passes._broke(self._number)


class _Outer:
    """Waits for the node that ran an inner pass, and then queues the end again in the pass of that node.

    The node's hook alone keeps it: its end without a call means that the node never came to its end.
    """

    def __init__(self, passes: BackwardPasses, node: Any, settled: int) -> None:
        self._passes = passes
        self._settled = settled
        self._fired = False
        self._handle = node.register_hook(self._after_node)

    def _after_node(self, *_: Any) -> None:
        self._fired = True
        self._handle.remove()
        if self._settled == self._passes._settled:
            self._passes._inner_depth = None
            self._passes.enter()

    def __del__(self) -> None:
        if not self._fired and self._settled == self._passes._settled:
            self._passes._on_broken()


_RUN_BACKWARD = graph._engine_run_backward.__code__


def _depth() -> int:
    """How many backward passes run in this thread, one within the other."""
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back
    return depth


def _is_any_running() -> bool:
    """Whether any thread of this process runs a backward pass."""
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is _RUN_BACKWARD:
                return True
            at = at.f_back
    return False


def _queue(callback: Callable[[], None]) -> None:
    _in_engine.append(weakref.ref(callback))
    Variable._execution_engine.queue_callback(callback)


_in_engine: deque[weakref.ref[Callable[[], None]]] = deque(maxlen=16)  # of the last pass or two


def _await_engine() -> None:
    """At exit: a thread of the engine's that wants to let go of Python's objects while Python ends aborts the process."""
    until = time.monotonic() + ENDS_WITHIN_S
    while any(callback() is not None for callback in _in_engine) and time.monotonic() < until:
        time.sleep(PAUSE_S)


atexit.register(_await_engine)


def _await_compiled(end: _End) -> None:
    global compiled_pass_open
    _compiled_ends.append(weakref.ref(end))
    compiled_pass_open = True


def compiled_pass_ended() -> None:
    """All hooks of a pass of compiled autograd have been called."""
    global compiled_pass_open
    ends = [ref() for ref in _compiled_ends]
    _compiled_ends.clear()
    compiled_pass_open = False
    for end in ends:
        if end is not None:
            end()


def without_grad() -> AbstractContextManager[Any]:
    """`torch.no_grad()` where it is needed. In a hook it mostly is not, and asking is cheaper than seeing to it."""
    return torch.no_grad() if torch.is_grad_enabled() else _as_it_is


_as_it_is = nullcontext()


def has_other_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody besides us looks at this parameter's gradients as they come."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1


def hook_tables(parameters: Iterable[torch.Tensor | None]) -> list[HookTable]:
    """Where hooks on these parameters' gradients are kept, ours and others'; weakly, as the hooks in them lead to us."""
    tables = [getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters]
    return [weakref.ref(table) for table in tables if table is not None]


def count_hooks(tables: Iterable[HookTable]) -> int:
    """How many hooks there are: what changes when somebody registers one. In C, as it runs for every parameter."""
    try:
        return sum(map(len, map(operator.call, tables)))  # type: ignore[arg-type]
    except TypeError:  # a parameter is gone, and its table with it
        return -1


class GradientHook:
    """Calls a function each time a gradient was accumulated into a parameter."""

    def __init__(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        compiler.prepare(parameter, hook)
        self._parameter = weakref.ref(parameter)
        self._handle = parameter.register_post_accumulate_grad_hook(hook)

    def call(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Call another function from now on, in the same place among the parameter's hooks; also while it is frozen."""
        parameter = self._parameter()
        if parameter is not None:
            compiler.prepare(parameter, hook)
        hooks = self._handle.hooks_dict_ref()
        if hooks is not None and self._handle.id in hooks:
            hooks[self._handle.id] = hook

    def remove(self) -> None:
        self._handle.remove()


def hook_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """Call `hook` each time a gradient was accumulated into the parameter; the returned function removes it."""
    return GradientHook(parameter, hook).remove
