"""What a DDP module does in torch's `Join` for ranks that have run out of inputs, by torch's method names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.api.ddp import contexts
from phalanx.reducer.reducer import Reducer


class Joining:
    """The part of a DDP module that shadows the collectives of ranks that still have inputs."""

    process_group: Any
    device: torch.device
    require_backward_grad_sync: bool
    forward_sync_buffers: bool
    _engine: Reducer
    _comm_hooks: list[Any]
    _join_config: Any
    _divide_by_initial_world_size: Any
    _shadows_context: bool
    _find_common_rank: Callable[[int, bool], int]
    _sync_module_states: Callable[..., None]
    _context_gradients: Callable[[], contexts.ContextGradients]

    @property
    def _distributed_rank(self) -> int:
        return dist.get_rank(self.process_group)

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        self._authoritative_rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        self._sync_module_states(source=self._authoritative_rank, buffers=self.forward_sync_buffers)

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Tell ranks that have run out whether this forward's backward synchronises, and whether in a context."""
        syncs = not is_joined_rank and self.require_backward_grad_sync
        in_context = syncs and torch.is_grad_enabled() and contexts.current() is not None
        said = torch.tensor([float(syncs), float(in_context)], device=self.device)
        work = dist.all_reduce(said, group=self.process_group, async_op=True)
        if not is_joined_rank:
            return None
        assert work is not None
        work.wait()
        num_syncing, num_in_context = (round(number) for number in said.tolist())
        if 0 < num_in_context < num_syncing:
            error = f"{num_in_context} of {num_syncing} ranks ran this forward in a context of distributed autograd"
            raise RuntimeError(f"{error}: all must, or none")
        self._shadows_context = num_in_context > 0
        return num_syncing > 0

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """A rank that has run out takes part in the others' step with zeros, and leaves its own gradients alone."""
        engine = self._engine
        # Of several that are joined together only the first counts who is left; the others divide by all, as in torch.
        by_initial_size = bool(self._divide_by_initial_world_size) or not self._join_config.is_first_joinable
        engine.divisor = None if by_initial_size else 1  # as on the others: the same reduction, whatever they divide by
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
