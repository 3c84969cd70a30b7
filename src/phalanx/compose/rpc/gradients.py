"""A module's gradients in contexts: which parameters have arrived, in which context, and that nothing goes unnoticed.

In a backward pass of distributed autograd the hooks of a parameter's AccumulateGrad node run, and those of the parameter
itself do not. They cannot see the context either. So outputs of a forward pass carry a hook that knows it: it runs
first, and from then on the number of the graph task stands for the context.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel.distributed import _find_tensors

from phalanx.compose.rpc.context_pass import NOBODY, ContextPass
from phalanx.compose.rpc.rounds import Rounds
from phalanx.compose.rpc.task_end import end_of_task, in_context_pass
from phalanx.compose.rpc.unused import reachable, with_zeros_for
from phalanx.errors import ReducerStateError
from phalanx.reducer.grad_hooks import current_pass
from phalanx.reducer.reducer import Reducer


class RpcGradients:
    """What `phalanx.api.ddp.contexts.ContextGradients` asks for. `withdraw` says whether a forward pass outside of any
    context waits for its backward, and lets it wait no more."""

    def __init__(self, engine: Reducer, *, finds_unused: bool, withdraw: Callable[[], bool]) -> None:
        self._engine = engine
        self._finds_unused = finds_unused
        self._withdraw = withdraw
        self._rounds: Rounds | None = None
        self._setup = threading.Lock()
        self._open: dict[int, ContextPass] = {}
        self._by_task: dict[int, ContextPass | None] = {}
        self._num_passes = 0
        self._nodes: list[Any] = []
        self._handles: list[Any] = []

    # -- hooks -----------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        if not self._nodes:
            self._hook_nodes()

    def _hook_nodes(self) -> None:
        """Hook the nodes that accumulate gradients. They are kept: a parameter alone does not keep its node."""
        with torch.enable_grad():
            nodes = [get_gradient_edge(slot.parameter).node for slot in self._engine.slots]
        if all(mine is other for mine, other in zip(self._nodes, nodes, strict=False)) and len(nodes) == len(
            self._nodes
        ):
            return
        self.close()  # a cast in place gave some parameters other nodes
        self._nodes = nodes
        this = weakref.ref(self)  # a node must not lead back to what keeps it
        self._handles = [node.register_hook(_arrival(this, index)) for index, node in enumerate(nodes)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _arrived(self, index: int) -> None:
        task = current_pass()
        a_pass = self._by_task[task] if task in self._by_task else self._only_one_open()
        end = end_of_task()
        if a_pass is None:
            if task not in self._by_task and self._withdraw():
                end.fail(
                    self._error(
                        "the backward pass runs in a context of distributed autograd, and the forward pass "
                        "did not: call the DDP module within the same context, or call loss.backward()"
                    )
                )
            return
        if a_pass.is_over:
            end.fail(
                self._error(
                    "a second backward pass in one context, for one forward pass: its gradients are added "
                    "to averages, and nobody averages them. Run forward again, or open another context"
                )
            )
            return
        end.join(a_pass)
        a_pass.arrive(index)

    def _entered(self, a_pass: ContextPass | None) -> None:
        """A backward pass has come to the outputs of a forward pass; None of one that keeps gradients local."""
        if not int(dist_autograd._get_debug_info()["num_current_backward_passes"]):
            return  # outside of any context: `check_plain_pass` will see it
        task = current_pass()
        if self._by_task.get(task) is None:
            self._by_task[task] = a_pass
        if a_pass is not None and not a_pass.is_over:
            end_of_task().join(a_pass)

    def _only_one_open(self) -> ContextPass | None:
        """Where the outputs' hook did not run, as outputs were of a kind that nobody can look into."""
        passes = list(self._open.values())
        return passes[0] if len(passes) == 1 else None

    # -- the module's side -----------------------------------------------------------------------------------------

    def forward_ended(self, context: int, output: Any, *, syncs: bool, divisor: int | None) -> Any:
        self._hook_nodes()
        self._forget_closed()
        a_pass = self._pass_for(context, divisor) if syncs else None
        if a_pass is not None and self._finds_unused:
            slots = self._engine.slots
            parameters = [slot.parameter for slot in slots]
            absent = a_pass.agree_on_use(reachable(_find_tensors(output), context, parameters))
            if absent:
                sparse = [slots[index].bucket.spec.sparse for index in absent]
                output = with_zeros_for(output, [parameters[index] for index in absent], sparse)
        this = weakref.ref(self)
        for tensor in _find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(_entry(this, a_pass))
        return output

    def _pass_for(self, context: int, divisor: int | None) -> ContextPass:
        rounds = self._ready()
        with self._setup:
            a_pass = self._open.get(context)
            if a_pass is None:
                a_pass = self._open[context] = self._new_pass(rounds, context, self._open, divisor)
        return a_pass

    def _new_pass(
        self, rounds: Rounds, context: int, siblings: dict[int, ContextPass], divisor: int | None
    ) -> ContextPass:
        self._num_passes += 1
        return ContextPass(
            rounds, context, siblings, divisor=divisor, finds_unused=self._finds_unused, number=self._num_passes
        )

    def _ready(self) -> Rounds:
        with self._setup:
            if self._rounds is None:
                self._rounds = Rounds(self._engine)
            else:
                self._rounds.refresh()
            return self._rounds

    def _forget_closed(self) -> None:
        """Contexts that were left without a backward pass, and tasks that are over."""
        for context in list(self._open):
            try:
                dist_autograd._is_valid_context(context)
            except RuntimeError:
                a_pass = self._open.pop(context, None)
                # Its end is noticed when the engine drops its graph task, which another thread may be about to do.
                if a_pass is not None and a_pass.has_begun:
                    a_pass.abandon()
        for task, a_pass in list(self._by_task.items()):
            if a_pass is None or a_pass.is_over:
                self._by_task.pop(task, None)

    def check_plain_pass(self) -> None:
        self._forget_closed()
        if self._open:
            raise self._error(
                "a backward pass outside of the context of distributed autograd in which the module's forward ran: its "
                "gradients would not be averaged. Call dist_autograd.backward(context_id, [loss]) within the context"
            )

    def shadow(self, *, divisor: int | None) -> None:
        self._new_pass(self._ready(), NOBODY, {}, divisor).shadow()

    def _error(self, message: str) -> ReducerStateError:
        return ReducerStateError(f"{self._engine.name}: {message}", rank=self._engine.group.rank)


def _arrival(this: weakref.ref[RpcGradients], index: int) -> Callable[..., None]:
    def on_gradient(_: Any, gradients: tuple[torch.Tensor | None, ...]) -> None:
        owner = this()
        if owner is None or gradients[0] is None:
            return
        # Until torch 2.12 the node is current when it is only captured, too: there the outputs' hook has to tell.
        if in_context_pass() or current_pass() in owner._by_task:
            owner._arrived(index)

    return on_gradient


def _entry(this: weakref.ref[RpcGradients], a_pass: ContextPass | None) -> Callable[[torch.Tensor], None]:
    def on_output(_: torch.Tensor) -> None:
        if (owner := this()) is not None:
            owner._entered(a_pass)

    return on_output
