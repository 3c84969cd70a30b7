"""Compiled autograd: the whole backward pass is one captured graph, which calls the hooks of parameters.

Ours become an operator of the graph (`arrivals`), so buckets leave while the rest of it has yet to run. That such a pass
is over is said by what the compiler puts at the end of every one of these graphs, a call that runs the callbacks of the
pass: there is a line of ours behind it, where a reducer waits for it. It runs outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._dynamo import compiled_autograd
from torch._dynamo.external_utils import FakeCompiledAutogradEngine as PassEnd

from phalanx.compose.compile import arrivals, frames
from phalanx.reducer import grad_hooks

_run_callbacks = PassEnd.exec_final_callbacks


def _end_of_graph(callbacks: list[Callable[[], None]]) -> None:
    _run_callbacks(callbacks)
    _end_of_pass()


def _end_of_pass() -> None:
    if grad_hooks.compiled_pass_open:
        arrivals.finish()
        grad_hooks.compiled_pass_ended()


def install() -> None:
    arrivals.define()
    grad_hooks.compiler.in_pass = lambda: compiled_autograd.in_compiled_autograd_region
    frames.pass_over(_end_of_pass, because="it ends a step of averaging gradients", with_all_it_calls=True)
    # Looked up by the compiler whenever it compiles such a graph.
    PassEnd.exec_final_callbacks = staticmethod(_end_of_graph)  # type: ignore[method-assign,assignment]
