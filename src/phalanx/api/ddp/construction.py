"""What the constructor decides before there is an engine: the group, the parameters, and whether the ranks agree."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from phalanx.api.axis import check_mesh, group_along
from phalanx.api.lowering import Lowering
from phalanx.api.replica import is_replicated
from phalanx.comm.c10d import C10dGroup
from phalanx.comm.coalesced import broadcast_coalesced
from phalanx.errors import MismatchError
from phalanx.reducer.plan import BucketPolicy
from phalanx.reducer.spread import part_of, problem_with_spread
from phalanx.reducer.verify import TensorEntry, verify_same

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """The group to average over. Parameters that are DTensors over other axes of the mesh stay what they are."""
    if device_mesh is None:
        chosen = dist.distributed_c10d._get_default_group() if process_group is None else process_group
        if not isinstance(chosen, dist.ProcessGroup):  # what new_group returns to ranks that are not in it
            raise ValueError(f"process_group must be a group that this rank is in, got {chosen!r}")
        return chosen
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    check_mesh(device_mesh)
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    return group_along(device_mesh)


def choose_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """From the new argument and the deprecated one: whether a forward syncs buffers, and whether construction does."""
    if broadcast_buffers is not None:
        more = (
            "its value is ignored, since `forward_sync_buffers` is given too."
            if forward_sync_buffers is not None
            else "use `forward_sync_buffers`. Mind that `forward_sync_buffers=False`, unlike `broadcast_buffers=False`, "
            "still copies rank 0's buffers once, at construction."
        )
        warnings.warn(f"`broadcast_buffers` is deprecated: {more}", FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    effective = True if broadcast_buffers is None else broadcast_buffers
    return effective, effective


def problem_with(
    module: nn.Module, parameters: Sequence[nn.Parameter], group: C10dGroup, *, delayed: bool
) -> Exception | None:
    """Why this module cannot be wrapped, as the error to raise. `delayed`: other parameters are reduced apart."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    if not delayed and not any(parameter.requires_grad for parameter in parameters):
        return RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    for parameter in parameters:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return RuntimeError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy "
                f"forward pass to correctly initialize the modules (parameter {names[id(parameter)]})"
            )
        if parameter.device.type == "meta":
            return RuntimeError(
                f"parameter {names[id(parameter)]} is on the meta device and holds no values: materialise the module "
                "(to_empty and initialise, or load a state_dict) before wrapping it"
            )
    for name, submodule in module.named_modules():
        if is_replicated(submodule):
            return ValueError(
                f"{name or 'the module'} is already replicated: its gradients are averaged without a wrapper. "
                "Use phalanx.replicate or DistributedDataParallel, not both"
            )
    for parameter in parameters:
        if (missing := group.lacks_backend_for(parameter.device.type, names[id(parameter)])) is not None:
            return RuntimeError(missing)
    ranks = dist.get_process_group_ranks(group.process_group)
    return problem_with_spread([(names[id(parameter)], parameter) for parameter in parameters], ranks)


def trained_parameters(module: nn.Module, ignored: Collection[str]) -> list[tuple[str, nn.Parameter]]:
    """Parameters that need a gradient and are not ignored, each once and under its first name, as torch orders them."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, submodule in module.named_modules():
        for key, parameter in submodule.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            # torch joins with a dot also where there is no prefix, and so do lists made for it.
            if parameter.requires_grad and name not in ignored and f"{prefix}.{key}" not in ignored:
                found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def verify_alike(
    group: C10dGroup,
    named: Sequence[tuple[str, nn.Parameter]],
    problem: Exception | None = None,
    *,
    lowering: Lowering | None = None,
    policy: BucketPolicy | None = None,
) -> None:
    """Raise on every rank if some rank has another model, precision or buckets, or a problem of its own. Collective."""
    entries = [] if problem is not None else [TensorEntry.of(name, p, "parameter") for name, p in named]
    if lowering is not None:
        entries = [
            dataclasses.replace(entry, dtype=entry.dtype + lowering.described(entry.name, parameter))
            for entry, (_, parameter) in zip(entries, named, strict=True)
        ]
    try:
        verify_same(
            group,
            entries,
            options={"the size of buckets (where bucket_cap_mb is not given, it depends on the device)": str(policy)},
            problem=None if problem is None else str(problem),
        )
    except MismatchError as error:
        raise MismatchError(f"DDP expects same model across all ranks, but {error.message}", rank=group.rank) from None
    if problem is not None:
        raise problem


def sync_module_states(
    group: C10dGroup, module: nn.Module, ignored: Collection[str], *, source: int, buffers: bool
) -> None:
    """Copy one rank's parameters, and its buffers if asked to, to all others. Collective."""
    state = [part_of(parameter).detach() for name, parameter in module.named_parameters() if name not in ignored]
    if buffers:
        state += [part_of(buffer) for name, buffer in module.named_buffers() if name not in ignored]
    broadcast_coalesced(group, state, source=source)
