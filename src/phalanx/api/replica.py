"""The state behind a replicated module, and which module has which."""

from __future__ import annotations

import dataclasses
import json
import logging
import weakref

import torch
from torch import nn

from phalanx.api import engines, optimizer_watch
from phalanx.api.buffers import BufferPolicy, BufferSync
from phalanx.api.lowering import Lowering
from phalanx.comm.c10d import C10dGroup
from phalanx.comm.group import Group
from phalanx.errors import ReducerStateError
from phalanx.optim.in_backward import take_over
from phalanx.reducer.options import ReducerOptions
from phalanx.reducer.plan import BucketPolicy
from phalanx.reducer.reducer import Reducer
from phalanx.reducer.spread import part_of
from phalanx.reducer.standing import AGREE_WITHIN_S
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.verify import TensorEntry, verify_same
from phalanx.reducer.watch import ModuleWatch, expects_sparse, named_trained_parameters

logger = logging.getLogger(__name__)

# By module. A replica also lives as long as any of its parameters: their hooks lead to it, so that a module that was
# only a container for the call may go. It must not lead to them in turn (see ParameterSlot), and a watch does.
replicas: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
watches: weakref.WeakKeyDictionary[nn.Module, ModuleWatch] = weakref.WeakKeyDictionary()
_CHANGE_ALIKE = (
    "What changes between steps (frozen, replaced, cast) must change on every rank, between the same two steps. Put it "
    "right, then call phalanx.replicate(phalanx.unreplicate(module)) on every rank"
)


class Replica:
    """The state behind a replicated module: its group, its reducer, its buffers, and when a pass synchronises."""

    def __init__(
        self,
        module: nn.Module,
        group: C10dGroup,
        policy: BucketPolicy,
        buffers: BufferPolicy,
        ignored: frozenset[str],
        lowering: Lowering | None = None,
    ) -> None:
        self._module = weakref.ref(module)
        self._ignored = ignored
        self.lowering = lowering
        self.group: Group = group
        self.no_sync_depth = 0
        self.accumulation: list[int] = []
        self.num_backwards = 0
        self.said_unused = False
        self._took_over = False
        named = named_trained_parameters(module, ignored.__contains__)
        self.reducer = Reducer(
            named,
            group,
            sparse=expects_sparse(module, named),
            options=ReducerOptions(
                policy=policy, wire_dtype=None if lowering is None else lowering.policy.reduce_dtype
            ),
            name=type(module).__name__,
        )
        watch = watches[module] = ModuleWatch(module, ignored=ignored.__contains__)
        self._watch = weakref.ref(watch)
        self.buffers = BufferSync(module, group, buffers, ignored)
        self.reducer.gate = self._synchronises_now
        self.reducer.own_flags = self._flags
        self.reducer.on_change = self._after_change
        self.reducer.behind_step = self.buffers.after_step
        self.reducer.on_report = [self._say_unused]
        optimizer_watch.watch(self)
        engines.add(self.reducer)
        if lowering is not None:
            lowering.install()

    def parameters(self) -> list[nn.Parameter]:
        """Those that are averaged, and those that the module holds by now; they differ where it was changed.

        Only what still exists: a replica whose module is gone may wait a while for the garbage collector.
        """
        module = self._module()
        known = [parameter for slot in self.reducer.slots if (parameter := slot.ref()) is not None]
        return known if module is None else [*known, *module.parameters()]

    def state(self, module: nn.Module) -> list[torch.Tensor]:
        """The parameters and buffers that are alike on all ranks, or this rank's parts of them."""
        return [part_of(tensor) for _, tensor in named_state(module, self._ignored)]

    def described(self, asking: nn.Module) -> str:
        module = self._module()
        if module is None:
            return "a module that is gone, but not its parameters"
        return "this module" if module is asking else f"a {type(module).__name__}"

    def takes_part(self) -> bool:
        """Whether an optimizer's step without a synchronised pass means that this rank still owes the others a step."""
        return not self.no_sync_depth and not self.accumulation

    def _synchronises_now(self) -> bool:
        if not self._took_over:
            self._take_over_optimizers()
        if self.no_sync_depth:
            return False
        if self.accumulation:
            self.num_backwards += 1
            return self.num_backwards % self.accumulation[-1] == 0
        return True

    def _take_over_optimizers(self) -> None:
        """Of torch's `_apply_optimizer_in_backward`: looked for in the first pass, as its DDP does in the first forward."""
        self._took_over = True
        take_over(self.reducer, [slot.parameter for slot in self.reducer.slots])

    def _flags(self) -> int:
        if not self._took_over:  # on a rank that takes part without a pass
            self._take_over_optimizers()
        changed = self.has_changed(all_arrived=self.reducer.all_arrived)
        flags = self.buffers.flags()
        return flags | Flag.CHANGED if changed else flags

    def has_changed(self, *, all_arrived: bool = False) -> bool:
        """Whether the module's parameters are not those that were agreed on in the last step."""
        module = self._module()
        if module is None:
            return False
        in_forward = self.lowering is not None and self.lowering.active  # casts stand in for the parameters
        watch = self._watch()
        return not in_forward and watch is not None and watch.changed(all_arrived=all_arrived)

    def _after_change(self, report: Report) -> None:
        """Some rank's parameters are not what was agreed on. All ranks compare, and go on together or not at all."""
        changed = report.ranks_with(Flag.CHANGED)
        module = self._module()
        if not changed or module is None:
            return
        watch = self._watch()
        assert watch is not None, "it lives as long as the module"
        added = watch.added(module)
        problem = (
            f"parameter {added[0]} was added after replicate(): its gradient would not be averaged. "
            "Add parameters before, or call phalanx.unreplicate and replicate again"
            if added
            else None
        )
        entries = state_entries(module, self._ignored, self.lowering)
        verify_same(self.group, entries, problem=problem, doing="go on with its model", advice=_CHANGE_ALIKE)
        if problem is not None:
            raise ReducerStateError(problem, rank=self.group.rank, step=self.reducer.stats.steps, parameters=added)
        known = {id(slot.ref()) for slot in self.reducer.slots}
        watch.remember(module)
        self.buffers.remember(module)
        named = named_trained_parameters(module, self._ignored.__contains__)
        self.reducer.replan(named, sparse=expects_sparse(module, named), reason="parameters were frozen or replaced")
        missed = [slot.index for slot in self.reducer.slots if id(slot.parameter) not in known]
        self._check_missed_alike(missed)
        self.reducer.reduce_now(missed, self.reducer.weighting.share)
        optimizer_watch.forget_optimizers()

    def _check_missed_alike(self, missed: list[int]) -> None:
        """What was replaced or unfrozen must be so on all ranks: elsewhere its gradient is already in an average."""
        parts = self.group.exchange("parameters replaced", json.dumps(missed).encode(), timeout_s=AGREE_WITHIN_S)
        by_rank = [set(json.loads(part)) for part in parts]
        differing = sorted(set.union(*by_rank) - set.intersection(*by_rank))
        if differing:
            names = [self.reducer.slots[index].name for index in differing]
            ranks = [rank for rank, indices in enumerate(by_rank) if differing[0] in indices]
            raise ReducerStateError(
                f"parameter {names[0]} was replaced or unfrozen on ranks {ranks} and not on the others: do so on every "
                "rank, between the same two steps",
                rank=self.group.rank,
                step=self.reducer.stats.steps,
                parameters=names,
            )

    def _say_unused(self, report: Report) -> None:
        unused = self.reducer.stats.unused  # by name: the parameters may have changed since
        if unused and not self.said_unused and self.group.rank == 0:
            self.said_unused = True
            logger.info("no rank used these parameters in this step; their gradient stays None: %s", ", ".join(unused))


def replica_of(module: nn.Module) -> Replica:
    """The state of a replicated module; an error that says what to do for any other."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"this takes the module that was given to phalanx.replicate, got {type(module).__name__}")
    found = replicas.get(module)
    if found is None:
        inside = [name for name, child in module.named_modules() if child in replicas]
        hint = f" (but its submodule {inside[0]} is)" if inside else ""
        raise ValueError(f"this {type(module).__name__} is not replicated{hint}: call phalanx.replicate on it first")
    return found


def is_replicated(module: nn.Module) -> bool:
    """Whether `replicate` was called on this very module, and not undone."""
    return module in replicas


def named_state(module: nn.Module, ignored: frozenset[str]) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that must be alike on all ranks."""
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if name not in ignored]


def state_entries(module: nn.Module, ignored: frozenset[str], lowering: Lowering | None) -> list[TensorEntry]:
    """Likewise, as ranks compare them."""
    entries = [
        TensorEntry.of(name, tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer")
        for name, tensor in named_state(module, ignored)
    ]
    if lowering is None:
        return entries
    tensors = [tensor for _, tensor in named_state(module, ignored)]
    return [
        dataclasses.replace(entry, dtype=entry.dtype + lowering.described(entry.name, tensor))
        for entry, tensor in zip(entries, tensors, strict=True)
    ]
