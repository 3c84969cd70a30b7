"""What a DDP module does in torch's `Join` for ranks that have run out of inputs, by torch's method names."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.ddp import contexts
from phalanx.api.sync_batch_norm import Shadowing, problem_with, synchronized_layers
from phalanx.comm.c10d import C10dGroup
from phalanx.errors import PhalanxError
from phalanx.reducer.reducer import Reducer


class Joining:
    """The part of a DDP module that shadows the collectives of ranks that still have inputs."""

    module: nn.Module
    process_group: Any
    device: torch.device
    static_graph: bool
    require_backward_grad_sync: bool
    _has_rebuilt_buckets: bool
    forward_sync_buffers: bool
    _engine: Reducer
    _comm_hooks: list[Any]
    _join_config: Any
    _divide_by_initial_world_size: Any
    _shadows_context: bool
    _find_common_rank: Callable[[int, bool], int]
    _sync_module_states: Callable[..., None]
    _context_gradients: Callable[[], contexts.ContextGradients]
    _group: Callable[[], C10dGroup]
    _norms: Shadowing | None = None
    """The SyncBatchNorm layers inside; None where there are none, or where no rank is to shadow them."""
    _norms_of: Any = None
    """The join that they were looked up for."""

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _note_rebuilt_buckets(self) -> None:
        """ZeRO's overlapping hooks ask whether buckets are final, in the forward that torch's buckets are so.

        On a rank that shadows, too: it runs the hooks, and must do there what the others do.
        """
        planner = self._engine.planner
        # Once the order of arrival is agreed on, the next backward begins with laying out. torch's static graph waits.
        is_due = planner.arrivals is None and planner.options.replan and not self.static_graph
        if not self._has_rebuilt_buckets and (is_due or planner.has_replanned):
            self._has_rebuilt_buckets = True

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        if self._norms is not None:
            self._norms.finish()
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        self._sync_module_states(source=self._authoritative_rank, buffers=self.forward_sync_buffers)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Tell ranks that have run out whether this forward's backward synchronises, and whether in a context."""
        self._look_up_norms()
        syncs = not is_joined_rank and self.require_backward_grad_sync
        in_context = syncs and torch.is_grad_enabled() and contexts.current() is not None
        said = torch.tensor([float(syncs), float(in_context), float(is_joined_rank)], device=self.device)
        work = dist.all_reduce(said, group=self.process_group, async_op=True)
        if not is_joined_rank and self._norms is None:
            return None
        assert work is not None
        work.wait()
        num_syncing, num_in_context, num_joined = (round(number) for number in self._group().read(said))
        if self._norms is not None and num_joined:
            self._shadow_norms(self._norms, is_joined_rank=is_joined_rank)
        elif self._norms is not None:
            self._norms.rest()
        if not is_joined_rank:
            return None
        self._note_rebuilt_buckets()
        if 0 < num_in_context < num_syncing:
            error = f"{num_in_context} of {num_syncing} ranks ran this forward in a context of distributed autograd"
            raise RuntimeError(f"{error}: all must, or none")
        self._shadows_context = num_in_context > 0
        return num_syncing > 0

    def _look_up_norms(self) -> None:
        """Once in a join: what of the model communicates in its own forward, and must be shadowed there."""
        config = self._join_config
        if self._norms_of is config:
            return
        self._norms_of, self._norms = config, None
        layers = synchronized_layers([self.module])
        if layers and config.enable and not config.throw_on_early_termination and self._group().size > 1:
            engine = weakref.ref(self._engine)

            def tell(reason: str) -> None:
                if (alive := engine()) is not None:
                    alive.group.post_failure(alive.topic, reason)

            self._norms = Shadowing(
                layers,
                self._group(),
                tell=tell,
                like=torch.empty(0, device=self.device),
                # Otherwise they are copied from a rank that has data, in the next forward or in the end.
                keeps_stats=not self.forward_sync_buffers,
            )

    def _shadow_norms(self, norms: Shadowing, *, is_joined_rank: bool) -> None:
        problem = problem_with(synchronized_layers([self.module]), self.process_group)
        if problem is not None:  # every rank is here, and finds the same
            raise RuntimeError(
                f"a rank has run out of inputs, and join() cannot shadow this model's collectives for it: {problem}, or "
                "pass throw_on_early_termination=True to join()"
            )
        norms.prepare()
        if is_joined_rank:
            norms.listen()
        else:
            norms.lead()

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """A rank that has run out takes part in the others' step with zeros, and leaves its own gradients alone."""
        engine = self._engine
        # Of several that are joined together only the first counts who is left; the others divide by all, as in torch.
        by_initial_size = bool(self._divide_by_initial_world_size) or not self._join_config.is_first_joinable
        engine.divisor = None if by_initial_size else 1  # as on the others: the same reduction, whatever they divide by
        try:
            self._shadow_step(engine, by_initial_size)
        except PhalanxError as error:
            if self._norms is not None:
                self._norms.break_off(f"a rank without inputs left join(): {error}")
            raise

    def _shadow_step(self, engine: Reducer, by_initial_size: bool) -> None:
        if self._shadows_context:
            self._context_gradients().shadow(divisor=engine.divisor)
            return
        own = [(slot.parameter, slot.parameter.grad, slot.dirty) for slot in engine.slots]
        in_bucket = {
            id(p): grad.clone() for (p, grad, _), slot in zip(own, engine.slots, strict=True) if grad is slot.shown
        }
        # By torch's contract a joined rank still counts, unless the average is over those that have not joined.
        engine.shadow(weight=1.0 if by_initial_size or self._comm_hooks else 0.0)
        slots = {id(slot.parameter): slot for slot in engine.slots}
        for parameter, gradient, dirty in own:
            slots[id(parameter)].dirty = dirty
            parameter.grad = in_bucket.get(id(parameter), gradient)

    def _match_unused_params_allreduce(self) -> None:
        """Which parameters were used travels with the gradients."""
