"""Compiled autograd: the whole backward pass is one captured graph, which calls the hooks of parameters.

Ours become an operator of the graph (`arrivals`), so buckets leave while the rest of it has yet to run. That such a pass
is over is told by what torch puts at the end of each of these graphs, a function that stands for the callbacks of the pass.
It gets a body: the end of a step. That runs outside of the graph, so there the graph ends, if it has arrivals of ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.external_utils import FakeCompiledAutogradEngine as PassEnd

from phalanx.compose.compile import arrivals, frames
from phalanx.reducer import grad_hooks

_run_callbacks = PassEnd.exec_final_callbacks


def end_of_pass() -> None:
    """All of a captured backward pass has run."""
    if grad_hooks.compiled_pass_open:
        arrivals.finish()
        grad_hooks.compiled_pass_ended()


def _end_of_graph(callbacks: list[Callable[[], None]]) -> None:
    """What the compiler sees in the place of that function. Where it finds a break, the function itself is called."""
    _run_callbacks(callbacks)
    if _has_arrivals():
        end_of_pass()


@torch._dynamo.assume_constant_result
def _has_arrivals() -> bool:
    return arrivals.seen_in_capture()


def _body_of_pass_end() -> None:
    import phalanx.compose.compile.autograd

    phalanx.compose.compile.autograd.end_of_pass()


def install() -> None:
    arrivals.define()
    grad_hooks.compiler.in_pass = lambda: compiled_autograd.in_compiled_autograd_region
    frames.pass_over(end_of_pass, because="it ends a step of averaging gradients", with_all_it_calls=True)
    PassEnd.exec_final_callbacks = staticmethod(_end_of_graph)  # type: ignore[method-assign,assignment]
    # Its body, not the function: the compiler knows it by identity, and a graph that it has captured already holds it.
    PassEnd._exec_final_callbacks_stub.__code__ = _body_of_pass_end.__code__
    frames.pass_over(PassEnd._exec_final_callbacks_stub, with_all_it_calls=True)
