"""`replicate`: make a module train data-parallel, in place. It stays what it was; the state behind it is a `Replica`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from phalanx.api import engines, optimizer_watch
from phalanx.api.axis import check_mesh, group_along
from phalanx.api.buffers import BufferPolicy, check_policy
from phalanx.api.lowering import Lowering
from phalanx.api.precision import Precision
from phalanx.api.replica import Replica, named_state, replica_of, replicas, state_entries, watches
from phalanx.comm.c10d import C10dGroup, group_of
from phalanx.comm.coalesced import broadcast_coalesced
from phalanx.comm.process_groups import own_group, release_group
from phalanx.reducer.plan import MIB, BucketPolicy, default_policy_for
from phalanx.reducer.spread import part_of, problem_with_spread
from phalanx.reducer.verify import verify_same
from phalanx.reducer.watch import named_trained_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_TORCHS_DDP = nn.parallel.DistributedDataParallel  # before anybody swaps it


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
    problem = _problem_with(module, ignored, group)
    if problem is None and precision is not None:
        problem = precision.problem_with(module)
    lowering = Lowering(module, precision) if precision is not None and problem is None else None
    policy = BucketPolicy() if problem else _policy(module, ignored, bucket_bytes, first_bucket_bytes)
    if init_sync:
        # A rank with a problem of its own tells the others before it raises: they would wait for it otherwise.
        entries = [] if problem else state_entries(module, ignored, lowering)
        options = {
            "bucket_bytes": bucket_bytes,
            "first_bucket_bytes": first_bucket_bytes,
            "buffers": buffers,
            "the size of buckets (where bucket_bytes is not given, it depends on the device)": str(policy),
        }
        verify_same(group, entries, options=options, problem=str(problem) if problem else None)
    if problem is not None:
        raise problem
    own = group_of(own_group(group.process_group))
    if init_sync:
        state = [part_of(tensor) for _, tensor in named_state(module, ignored)]
        broadcast_coalesced(own, state, source=0)
    replica = replicas[module] = Replica(module, own, policy, buffers, ignored, lowering)
    if own is not group:
        weakref.finalize(replica, release_group, own.process_group).atexit = False
    return module


def refuse_torchs_ddp(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Called by torch whenever a module becomes part of another: its own DDP around a replicated one would average nothing.

    Each takes gradients away that the other waits for, and what is left is zero, with no error.
    """
    if isinstance(parent, _TORCHS_DDP) and name == "module" and child is not None:
        inside = [type(one).__name__ for one in child.modules() if one in replicas]
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


def _problem_with(module: nn.Module, ignored: frozenset[str], group: C10dGroup) -> Exception | None:
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
    for name, tensor in named_state(module, ignored):
        if (missing := group.lacks_backend_for(tensor.device.type, name)) is not None:
            return ValueError(missing)
    return problem_with_spread(named_state(module, ignored), dist.get_process_group_ranks(group.process_group))


def unreplicate(module: ModuleT) -> ModuleT:
    """Stop averaging this module's gradients; every rank does so. It can be replicated again, also differently."""
    replica = replicas.pop(module, None)
    if replica is None:
        replica_of(module)
    else:
        watches.pop(module, None)
        if replica.lowering is not None:
            replica.lowering.remove()
        engines.remove(replica.reducer)
        replica.reducer.close()
        optimizer_watch.unwatch(replica)
    return module
