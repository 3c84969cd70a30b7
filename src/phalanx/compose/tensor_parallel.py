"""Tensor parallelism: parameters that are DTensors over one axis of a mesh, averaged over another.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    px.replicate(model, device_mesh=mesh["dp"])        # or DistributedDataParallel(model, device_mesh=mesh["dp"])

Nothing has to be called here for that: `import phalanx` registers what the reducer needs to know of DTensors, and
DTensor itself, which takes a second to import, is looked for only once somebody has imported it. The functions below are
for what torch's own cannot do where some parameters of a model are DTensors and others are plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.reducer import spread

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_TORCH_TRANSFORM = "torch.distributed.tensor.parallel.ddp"


class DTensorSpread:
    """What the reducer asks of a DTensor. Every rank of an axis of its mesh makes the same calls, in the same order."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return _is_dtensor(tensor)

    def part(self, tensor: Any) -> torch.Tensor:
        # Not `to_local`, which makes another tensor, and a node in a graph.
        return _arrived(tensor._local_tensor)

    def like(self, part: torch.Tensor, whole: Any) -> torch.Tensor:
        with torch.no_grad():
            return _dtensor().from_local(
                part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )

    def fitted(self, gradient: Any, parameter: Any) -> Any:
        """Partial sums, as of a norm's weight under sequence parallelism, are added up over the parameter's own axis."""
        if not _is_dtensor(gradient) or gradient.device_mesh != parameter.device_mesh:
            raise TypeError(
                f"the gradient of a DTensor must be a DTensor of the same mesh ({parameter.device_mesh}), got "
                f"{f'one over {gradient.device_mesh}' if _is_dtensor(gradient) else 'a plain tensor'}"
            )
        if gradient.placements == parameter.placements:
            return gradient
        with torch.no_grad():
            return gradient.detach().redistribute(placements=parameter.placements)

    def described(self, tensor: Any) -> str:
        mesh = tensor.device_mesh
        # Not the mesh's ranks: those that hold the same part are in different rows of it.
        axes = ", ".join(
            f"{placement} over {name} of {size}"
            for placement, name, size in zip(tensor.placements, _axes(mesh), mesh.shape, strict=True)
        )
        return f"DTensor of shape {list(tensor.shape)}, {axes}"

    def problem_with(self, tensor: Any, ranks: Sequence[int]) -> str | None:
        mesh = tensor.device_mesh
        if mesh.get_coordinate() is None:
            return f"is a DTensor over {mesh}, of which this rank is no member"
        others = set(ranks) - {dist.get_rank()}
        for number, (placement, axis) in enumerate(zip(tensor.placements, _axes(mesh), strict=True)):
            along = dist.get_process_group_ranks(mesh.get_group(number))
            if not placement.is_replicate() and others.intersection(along):
                return (
                    f"is a DTensor, {placement} over the mesh's axis {axis} (ranks {along}), and its gradient is to be "
                    f"averaged over ranks {sorted(ranks)}: they hold different parts of it. Average over another axis, "
                    "as in device_mesh=mesh['dp']"
                )
        return None


def register() -> None:
    """Make DTensors known to the reducer."""
    spread.register(DTensorSpread())


def pre_dp_module_transform(module: nn.Module) -> None:
    """Get a tensor-parallel module ready for data parallelism: torch's function of this name, without its cost.

    torch's DDP cannot take DTensors, so torch's function makes the parameters local, and puts DTensors in their place
    during every forward. Phalanx takes them as they are. So this leaves the module alone; where torch's function was
    called before, it puts the DTensor parameters back. Call it on every rank, before replicating or wrapping.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"pre_dp_module_transform takes a torch.nn.Module, got {type(module).__name__}")
    for submodule in module.modules():
        for key, parameter in submodule._parameters.items():
            spec = getattr(parameter, "_st_info", None)
            if parameter is None or spec is None:
                continue
            whole = _dtensor().from_local(
                parameter.detach(), spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
            submodule._parameters[key] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        tables: tuple[dict[int, Any], ...] = (submodule._forward_pre_hooks, submodule._forward_hooks)
        for hooks in tables:
            for number in [n for n, hook in hooks.items() if getattr(hook, "__module__", "") == _TORCH_TRANSFORM]:
                del hooks[number]


_pre_dp_module_transform = pre_dp_module_transform  # torch's spelling


def optimizer_groups(parameters: Iterable[nn.Parameter], **options: Any) -> list[dict[str, Any]]:
    """Parameters as groups for an optimizer, DTensors apart from plain ones: ``foreach`` and ``fused`` cannot mix them.

    `options` are those of every group. A kind that there is none of gets no group.
    """
    plain: list[nn.Parameter] = []
    spread_out: list[nn.Parameter] = []
    for parameter in parameters:
        (spread_out if _is_dtensor(parameter) else plain).append(parameter)
    return [{"params": members, **options} for members in (plain, spread_out) if members]


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a model in which only some parameters are DTensors; returns the whole norm.

    Every rank of the tensor-parallel axis calls it with alike parameters, since the norm of a DTensor is that of all its
    parts. torch's function refuses the mixture, and does as well where all parameters are DTensors.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
    kinds: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [
        _whole(nn.utils.get_total_norm(kind, norm_type, error_if_nonfinite, foreach=foreach)) for kind in kinds.values()
    ]
    if not norms:
        return torch.tensor(0.0, device=listed[0].device if listed else "cpu")
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    for part in spread.parts_of(gradients):
        part.detach().mul_(factor.to(part.device))
    return total


def _whole(norm: Any) -> torch.Tensor:
    return norm.full_tensor() if _is_dtensor(norm) else norm


def _arrived(part: Any) -> Any:
    """A part that is still on its way, as what a collective of torch's functional kind returns, once it is there."""
    if type(part) is torch.Tensor:
        return part
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None and isinstance(part, functional.AsyncCollectiveTensor):
        return part.wait()
    return part


def _axes(mesh: Any) -> Sequence[str]:
    return mesh.mesh_dim_names or [f"number {dimension}" for dimension in range(mesh.ndim)]


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    # While it is being imported it does not have its class yet, and there can be no instance.
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _dtensor() -> type[DTensor]:
    from torch.distributed.tensor import DTensor

    return DTensor
