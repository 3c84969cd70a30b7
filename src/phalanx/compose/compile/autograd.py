"""Compiled autograd: the whole backward pass is one captured graph, which calls the hooks of parameters.

Ours run outside of the graph (`frames`): it is cut where one is called, so buckets leave while the rest of it has yet to
run. That such a pass is over is said by what the compiler puts at the end of every one of these graphs, a call that runs
the callbacks of the pass: there is a line of ours behind it, where a reducer waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._dynamo import compiled_autograd
from torch._dynamo.external_utils import FakeCompiledAutogradEngine as PassEnd

from phalanx.compose.compile import frames
from phalanx.reducer import grad_hooks

_run_callbacks = PassEnd.exec_final_callbacks


def _end_of_graph(callbacks: list[Callable[[], None]]) -> None:
    _run_callbacks(callbacks)
    if grad_hooks.compiled_pass_open:  # read when this is captured, after the hooks have run, and guarded
        grad_hooks.compiled_pass_ended()


def _end_of_uncompiled_graph() -> None:
    """The same, in a graph that is run as it was captured. Where it is compiled, the function above takes its place."""
    if grad_hooks.compiled_pass_open:
        grad_hooks.compiled_pass_ended()


def install() -> None:
    grad_hooks.compiler.in_pass = lambda: compiled_autograd.in_compiled_autograd_region
    frames.pass_over(grad_hooks.compiled_pass_ended, with_all_it_calls=True)
    # Looked up by the compiler whenever it captures such a graph.
    PassEnd.exec_final_callbacks = staticmethod(_end_of_graph)  # type: ignore[method-assign,assignment]
    stub = PassEnd._exec_final_callbacks_stub
    PassEnd._exec_final_callbacks_stub = staticmethod(_end_of_uncompiled_graph)  # type: ignore[method-assign]
    compiled_autograd._impure_targets.discard(stub)
    compiled_autograd._impure_targets.add(_end_of_uncompiled_graph)
