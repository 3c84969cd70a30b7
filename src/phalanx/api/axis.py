"""The axis of a device mesh that gradients are averaged over, as the group that it is."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def check_mesh(device_mesh: Any) -> None:
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"device_mesh takes a torch.distributed.device_mesh.DeviceMesh, got {type(device_mesh).__name__}"
        )


def group_along(axis: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh of one dimension, which this rank must be in."""
    if axis.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in device_mesh, which has ranks {axis.mesh.flatten().tolist()}"
        )
    return axis.get_group(mesh_dim=0)
