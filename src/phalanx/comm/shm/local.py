"""The collectives of a group whose ranks all share one host: group ranks are local indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from phalanx.comm.shm import collectives
from phalanx.comm.shm.all_reduce import all_reduce
from phalanx.comm.shm.mesh import Mesh


class Collectives(Protocol):
    """What a process group asks for. Blocking; every rank calls the same in the same order; roots are group ranks."""

    def barrier(self, *, timeout_s: float, signature: bytes) -> None: ...

    def all_reduce(self, flat: Tensor, op: str, *, timeout_s: float, signature: bytes) -> None: ...

    def reduce(self, flat: Tensor, op: str, root: int, *, timeout_s: float, signature: bytes) -> None: ...

    def broadcast(self, data: Tensor, root: int, *, timeout_s: float, signature: bytes) -> None: ...

    def all_gather(self, data: Tensor, targets: Sequence[Tensor], *, timeout_s: float, signature: bytes) -> None: ...

    def gather(
        self, data: Tensor, targets: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
    ) -> None: ...

    def scatter(
        self, target: Tensor, sources: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
    ) -> None: ...

    def all_to_all(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], *, timeout_s: float, signature: bytes
    ) -> None: ...

    def reduce_scatter(
        self, inputs: Sequence[Tensor], output: Tensor, op: str, *, timeout_s: float, signature: bytes
    ) -> None: ...


class LocalCollectives:
    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def barrier(self, *, timeout_s: float, signature: bytes) -> None:
        collectives.barrier(self._mesh, timeout_s=timeout_s, signature=signature)

    def all_reduce(self, flat: Tensor, op: str, *, timeout_s: float, signature: bytes) -> None:
        all_reduce(self._mesh, flat, op, timeout_s=timeout_s, signature=signature)

    def reduce(self, flat: Tensor, op: str, root: int, *, timeout_s: float, signature: bytes) -> None:
        collectives.reduce(self._mesh, flat, op, root, timeout_s=timeout_s, signature=signature)

    def broadcast(self, data: Tensor, root: int, *, timeout_s: float, signature: bytes) -> None:
        collectives.broadcast(self._mesh, data, root, timeout_s=timeout_s, signature=signature)

    def all_gather(self, data: Tensor, targets: Sequence[Tensor], *, timeout_s: float, signature: bytes) -> None:
        collectives.all_gather(self._mesh, data, targets, timeout_s=timeout_s, signature=signature)

    def gather(
        self, data: Tensor, targets: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
    ) -> None:
        collectives.gather(self._mesh, data, targets, root, timeout_s=timeout_s, signature=signature)

    def scatter(
        self, target: Tensor, sources: Sequence[Tensor] | None, root: int, *, timeout_s: float, signature: bytes
    ) -> None:
        collectives.scatter(self._mesh, target, sources, root, timeout_s=timeout_s, signature=signature)

    def all_to_all(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], *, timeout_s: float, signature: bytes
    ) -> None:
        collectives.all_to_all(self._mesh, sources, targets, timeout_s=timeout_s, signature=signature)

    def reduce_scatter(
        self, inputs: Sequence[Tensor], output: Tensor, op: str, *, timeout_s: float, signature: bytes
    ) -> None:
        collectives.reduce_scatter(self._mesh, inputs, output, op, timeout_s=timeout_s, signature=signature)
