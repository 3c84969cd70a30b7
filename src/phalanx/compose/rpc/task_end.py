"""When a backward pass in a context is over on this process, however many threads and remote calls it was made of.

Distributed autograd runs one graph task per process and context, which is complete when all remote calls of the context
have sent their gradients back. A callback queued on it runs then, and the user's call returns only after it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from phalanx.reducer.grad_hooks import current_pass

if TYPE_CHECKING:
    from phalanx.compose.rpc.context_pass import ContextPass


def in_context_pass() -> bool:
    """In a hook of an AccumulateGrad node: whether the node is only captured, as distributed autograd does."""
    return torch._C._current_autograd_node() is None


class TaskEnd:
    """Queued on a graph task. Called: it is complete. Dropped without a call: it raised, here or on another worker."""

    def __init__(self) -> None:
        self._passes: list[ContextPass] = []
        self._error: Exception | None = None

    def join(self, a_pass: ContextPass) -> None:
        if a_pass not in self._passes:
            self._passes.append(a_pass)

    def fail(self, error: Exception) -> None:
        """Raise this when the pass is over. What a hook raises reaches the user without its text."""
        self._error = self._error or error

    def __call__(self) -> None:
        passes, self._passes = self._passes, []
        errors = [] if self._error is None else [self._error]
        # All are sent before any is waited for: two modules may come to their end in another order on each rank.
        for act in (_send_rest, _finish):
            for a_pass in passes:
                try:
                    act(a_pass)
                except Exception as error:  # the other modules' peers wait for them all the same
                    errors.append(error)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        for a_pass in self._passes:
            a_pass.abandon()


def _send_rest(a_pass: ContextPass) -> None:
    a_pass.send_rest()


def _finish(a_pass: ContextPass) -> None:
    a_pass.finish()


# The engine alone keeps an end, so that dropping it is the engine's doing.
_ends: weakref.WeakValueDictionary[int, TaskEnd] = weakref.WeakValueDictionary()


def end_of_task() -> TaskEnd:
    """The end of the graph task that runs in this thread; call it in a hook."""
    number = current_pass()
    end = _ends.get(number)
    if end is None:
        end = _ends[number] = TaskEnd()
        Variable._execution_engine.queue_callback(end)
    return end
