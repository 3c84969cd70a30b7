"""`replicate`: make a module train data-parallel, in place. The module stays what it was; the state is kept here."""

from __future__ import annotations

import dataclasses
import json
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from phalanx.api import engines, optimizer_watch
from phalanx.api.axis import check_mesh, group_along
from phalanx.api.buffers import BufferPolicy, BufferSync, check_policy
from phalanx.api.lowering import Lowering
from phalanx.api.precision import Precision
from phalanx.comm.c10d import C10dGroup, group_of, own_group, release_group
from phalanx.comm.coalesced import broadcast_coalesced
from phalanx.comm.group import Group
from phalanx.errors import MismatchError, ReducerStateError
from phalanx.optim.in_backward import take_over
from phalanx.reducer.options import ReducerOptions, ReducerStats
from phalanx.reducer.plan import MIB, BucketPolicy, default_policy_for
from phalanx.reducer.reducer import Reducer
from phalanx.reducer.spread import part_of, problem_with_spread
from phalanx.reducer.standing import AGREE_WITHIN_S
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.verify import TensorEntry, verify_same
from phalanx.reducer.watch import ModuleWatch, expects_sparse, named_trained_parameters
from phalanx.reducer.weights import Reduction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger(__name__)
ModuleT = TypeVar("ModuleT", bound=nn.Module)

# By module. A replica also lives as long as any of its parameters: their hooks lead to it, so that a module that was
# only a container for the call may go. It must not lead to them in turn (see ParameterSlot), and a watch does.
_replicas: weakref.WeakKeyDictionary[nn.Module, Replica] = weakref.WeakKeyDictionary()
_watches: weakref.WeakKeyDictionary[nn.Module, ModuleWatch] = weakref.WeakKeyDictionary()
_TORCHS_DDP = nn.parallel.DistributedDataParallel  # before anybody swaps it
_weighted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_CHANGE_ALIKE = (
    "What changes between steps (frozen, replaced, cast) must change on every rank, between the same two steps. Put it "
    "right, then call phalanx.replicate(phalanx.unreplicate(module)) on every rank"
)


def replicate(
    module: ModuleT,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int = MIB,
    buffers: BufferPolicy = "rank0",
    ignore: Iterable[str] = (),
    init_sync: bool = True,
    precision: Precision | None = None,
) -> ModuleT:
    """Average this module's gradients over all ranks, in every backward pass, from now on. Returns the module itself.

    Every rank of the group calls it at the same point, with the same model and options; ranks compare names, shapes,
    dtypes and strides, and the first difference is an error on every rank. Rank 0's parameters and buffers are then
    copied to all (`init_sync`).

    After ``backward()`` returns, ``.grad`` holds the average on every rank. Nothing needs to be declared: parameters
    may be unused (on some ranks or all), used several times, checkpointed, accumulated or frozen, differently in every
    step. While a backward pass runs, ``.grad`` is empty; and gradients are views of the reducer's memory, so what you
    want to keep beyond the next backward pass, clone.

    Args:
        process_group: the ranks to average over; all of them by default.
        device_mesh: likewise, as one axis of a mesh. Parameters may be DTensors over its other axes: their parts on this
            rank are averaged, and stay DTensors.
        bucket_bytes: gradients travel together up to this size, by default 25 MiB, and on a GPU, where starting a
            collective costs the host most, a third of all within 25 and 160 MiB. The first and the last such bucket are
            as large as `first_bucket_bytes`, to start early and to end soon; on a GPU by default the last alone.
        buffers: ``"rank0"`` gives every rank rank 0's buffers after each step, ``"mean"`` the average of the floating
            ones, ``"none"`` leaves them alone.
        ignore: names of parameters and buffers that stay local to each rank.
        init_sync: whether ranks are compared and rank 0's values copied. Without it the ranks must be alike already.
        precision: compute and reduce in other dtypes than the parameters are kept in; see `Precision`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"replicate takes a torch.nn.Module, got {type(module).__name__}")
    check_policy(buffers)
    for option, value in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 1):
            raise ValueError(f"{option} takes a positive number of bytes; got {value!r}")
    if isinstance(ignore, str):
        raise TypeError(f"ignore takes a list of names, got the string {ignore!r}: write [{ignore!r}]")
    if precision is not None and not isinstance(precision, Precision):
        raise TypeError(f"precision takes a phalanx.Precision, got {type(precision).__name__}")
    group = group_of(_resolve(process_group, device_mesh))
    ignored = frozenset(ignore)
    problem = _problem_with(module, ignored, dist.get_process_group_ranks(group.process_group))
    if problem is None and precision is not None:
        problem = precision.problem_with(module)
    lowering = Lowering(module, precision) if precision is not None and problem is None else None
    policy = BucketPolicy() if problem else _policy(module, ignored, bucket_bytes, first_bucket_bytes)
    if init_sync:
        # A rank with a problem of its own tells the others before it raises: they would wait for it otherwise.
        entries = [] if problem else _entries(module, ignored, lowering)
        options = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes, "buffers": buffers}
        verify_same(group, entries, options=options, problem=str(problem) if problem else None)
    if problem is not None:
        raise problem
    own = group_of(own_group(group.process_group))
    if init_sync:
        state = [part_of(tensor) for _, tensor in _named_state(module, ignored)]
        broadcast_coalesced(own, state, source=0)
    replica = _replicas[module] = Replica(module, own, policy, buffers, ignored, lowering)
    if own is not group:
        weakref.finalize(replica, release_group, own.process_group).atexit = False
    return module


def refuse_torchs_ddp(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called by torch whenever a module becomes part of another: its own DDP around a replicated one would average nothing.

    Each takes gradients away that the other waits for, and what is left is zero, with no error.
    """
    if isinstance(parent, _TORCHS_DDP) and name == "module" and child is not None:
        inside = [type(one).__name__ for one in child.modules() if one in _replicas]
        if inside:
            raise ValueError(
                f"this {inside[0]} is already replicated by phalanx.replicate, which averages its gradients: do not wrap "
                f"it in {type(parent).__name__}, or call phalanx.unreplicate first"
            )


register_module_module_registration_hook(refuse_torchs_ddp)


def _resolve(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    if process_group is not None and device_mesh is not None:
        raise ValueError("give process_group or device_mesh, not both")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("there is no process group: call phalanx.init() (or init_process_group) before replicate")
    if device_mesh is not None:
        check_mesh(device_mesh)
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension (slice it, as in mesh['dp']); got {device_mesh}")
        return group_along(device_mesh)
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a process group that this rank is a member of; got {group!r}")
    return group


def _policy(
    module: nn.Module, ignored: frozenset[str], bucket_bytes: int | None, first_bucket_bytes: int
) -> BucketPolicy:
    if bucket_bytes is not None:
        small = min(first_bucket_bytes, bucket_bytes)
        return BucketPolicy(bucket_bytes, small, last_bucket_bytes=small)
    trained = named_trained_parameters(module, ignored.__contains__)
    return default_policy_for([part_of(parameter) for _, parameter in trained], small_bytes=first_bucket_bytes)


def _problem_with(module: nn.Module, ignored: frozenset[str], ranks: Sequence[int]) -> Exception | None:
    """What is wrong with the module on this rank alone, as the exception to raise."""
    every_name = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    unknown = sorted(ignored - every_name)
    if unknown:
        return ValueError(f"ignore names what the module does not have: {', '.join(unknown)}")
    held = {id(p): replica for replica in optimizer_watch.watched() for p in replica.parameters()}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return ValueError(
                f"parameter {name} is not initialised yet (a lazy module): run one forward pass with a sample batch first"
            )
        if name in ignored:
            continue
        if parameter.device.type == "meta":
            return ValueError(
                f"parameter {name} is on the meta device and holds no values: "
                "materialise the module (to_empty and initialise, or load a state_dict) before replicating it"
            )
        if hasattr(parameter, "_st_info"):
            return ValueError(
                f"parameter {name} was made local by torch's _pre_dp_module_transform, and would be another in each "
                "forward. It is not needed here; phalanx.compose.tensor_parallel.pre_dp_module_transform undoes it"
            )
        if id(parameter) in held:
            return ValueError(
                f"parameter {name} is already replicated, as part of {held[id(parameter)].described(module)}: "
                "replicate each parameter once, or call phalanx.unreplicate first"
            )
    if not named_trained_parameters(module, ignored.__contains__):
        return ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient: there is nothing to replicate"
        )
    return problem_with_spread(_named_state(module, ignored), ranks)


def _named_state(module: nn.Module, ignored: frozenset[str]) -> list[tuple[str, torch.Tensor]]:
    named: list[tuple[str, torch.Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if name not in ignored]


def _entries(module: nn.Module, ignored: frozenset[str], lowering: Lowering | None) -> list[TensorEntry]:
    entries = [
        TensorEntry.of(name, tensor, "parameter" if isinstance(tensor, nn.Parameter) else "buffer")
        for name, tensor in _named_state(module, ignored)
    ]
    if lowering is None:
        return entries
    tensors = [tensor for _, tensor in _named_state(module, ignored)]
    return [
        dataclasses.replace(entry, dtype=entry.dtype + lowering.described(entry.name, tensor))
        for entry, tensor in zip(entries, tensors, strict=True)
    ]


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
        watch = _watches[module] = ModuleWatch(module, ignored=ignored.__contains__)
        self._watch = weakref.ref(watch)
        self.buffers = BufferSync(module, group, buffers, ignored)
        self.reducer.gate = self._synchronises_now
        self.reducer.own_flags = self._flags
        self.reducer.on_change = self._after_change
        self.reducer.on_report = [self.buffers.after_step, self._say_unused]
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
        return [part_of(tensor) for _, tensor in _named_state(module, self._ignored)]

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
        entries = _entries(module, self._ignored, self.lowering)
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
    found = _replicas.get(module)
    if found is None:
        inside = [name for name, child in module.named_modules() if child in _replicas]
        hint = f" (but its submodule {inside[0]} is)" if inside else ""
        raise ValueError(f"this {type(module).__name__} is not replicated{hint}: call phalanx.replicate on it first")
    return found


def is_replicated(module: nn.Module) -> bool:
    """Whether `replicate` was called on this very module, and not undone."""
    return module in _replicas


def unreplicate(module: ModuleT) -> ModuleT:
    """Stop averaging this module's gradients; every rank does so. It can be replicated again, also differently."""
    replica = _replicas.pop(module, None)
    if replica is None:
        replica_of(module)
    else:
        _watches.pop(module, None)
        if replica.lowering is not None:
            replica.lowering.remove()
        engines.remove(replica.reducer)
        replica.reducer.close()
        optimizer_watch.unwatch(replica)
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backward passes in this block keep their gradients local; the next one outside reduces all that was kept.

    Decided when backward runs, not when forward did. All ranks must agree.
    """
    replica = replica_of(module)
    replica.no_sync_depth += 1
    try:
        yield
    finally:
        replica.no_sync_depth -= 1


@contextmanager
def accumulate(module: nn.Module, n: int) -> Iterator[None]:
    """In this block every n-th backward pass synchronises, and with it all gradients since the last that did.

    What is left over when the block ends (a shorter last group) is synchronised then. Gradients add up, as autograd
    does it: divide the loss by n for their mean. All ranks run the same number of backward passes in the block.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulate takes the number of backward passes per step, at least 1; got {n!r}")
    replica = replica_of(module)
    replica.accumulation.append(n)
    replica.num_backwards = 0
    finished = False
    try:
        yield
        finished = True
    finally:
        replica.accumulation.pop()
        left_over = replica.num_backwards % n
        replica.num_backwards = 0
        if finished and left_over:
            replica.reducer.synchronize()


def weight(module: nn.Module, n: float, *, reduction: Reduction = "mean") -> None:
    """This rank's weight in the next step's average: its number of samples or tokens. On all ranks of a step, or none.

    Call it before a backward pass whose loss is the mean over `n` samples, or with ``reduction="sum"`` their sum. The
    average is then the gradient of the mean over all ranks' samples: what one process would compute from all of them.
    Under `accumulate` or `no_sync` call it before each pass, with that pass's `n`: passes count by their share, and
    their weights add up. (Or once in a step, for gradients that you have scaled yourself.) Zero is for a batch without
    samples; its gradient must be zero too. `module` may be a `DistributedDataParallel`.
    """
    if isinstance(n, bool | str) or not hasattr(n, "__float__"):
        raise TypeError(f"a weight is a number of samples or tokens; got {n!r}")
    if not 0 <= n < float("inf"):
        raise ValueError(f"a weight is a number of samples or tokens, not negative and not infinite; got {n!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, as of the loss; got {reduction!r}")
    if reduction == "mean" and module not in _weighted:
        _weighted.add(module)
        if any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
            logger.warning(
                "%s has SyncBatchNorm: if batches differ in size, weights for the mean of a loss do not reach what lies "
                "below such a layer, whose backward adds up the ranks' gradients before they are weighted. Compute the "
                'loss as a sum and say phalanx.weight(…, reduction="sum"), which is exact',
                type(module).__name__,
            )
    _reducer_of(module).set_weight(float(n), reduction)


def synchronize(module: nn.Module) -> None:
    """Take part in this step though no backward pass of this rank reached the module: with zeros, or with what was kept.

    Needed only where a rank may skip the module in a step and reads its gradients (clipping, a GradScaler) before the
    optimizer steps; the optimizer's step calls it by itself.
    """
    replica_of(module).reducer.synchronize()


def step_stats(module: nn.Module) -> ReducerStats:
    """Counters of a replicated module, or of a DistributedDataParallel: steps so far and seconds spent waiting."""
    return _reducer_of(module).stats


def _reducer_of(module: nn.Module) -> Reducer:
    engine = getattr(module, "_engine", None)
    return engine if isinstance(engine, Reducer) else replica_of(module).reducer


__all__ = [
    "MismatchError",
    "accumulate",
    "is_replicated",
    "no_sync",
    "replicate",
    "step_stats",
    "synchronize",
    "unreplicate",
    "weight",
]
