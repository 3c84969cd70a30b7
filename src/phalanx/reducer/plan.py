"""Which gradients travel together: a pure function from parameters and a policy to buckets.

One collective per gradient would be slow, since each has a fixed cost; one for all of them could start only when the
backward pass is over. Buckets are between: big enough to use the link well, small enough that the first of them
leaves while most of the backward pass is still ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MIB = 1024 * 1024


@dataclass(frozen=True)
class ParameterSpec:
    """What planning needs to know of a parameter. `sparse` means that its gradients are sparse tensors."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @classmethod
    def of(cls, name: str, parameter: torch.Tensor, *, sparse: bool = False) -> ParameterSpec:
        return cls(name, tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype, parameter.device, sparse)

    @property
    def numel(self) -> int:
        product = 1
        for length in self.shape:
            product *= length
        return product

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def shown(self) -> str:
        return f"{self.dtype} {list(self.shape)} on {self.device} with strides {list(self.stride)}"


@dataclass(frozen=True)
class BucketPolicy:
    """How large buckets may become. A bucket is closed when it has reached its cap, so it may exceed it by a gradient.

    The first bucket is small: the sooner something is on the wire, the more of the reduction is hidden. With
    `per_bucket_bytes`, the i-th bucket has the i-th cap and later ones the last cap.
    """

    bucket_bytes: int = 25 * MIB
    first_bucket_bytes: int = MIB
    per_bucket_bytes: tuple[int, ...] = ()
    last_bucket_bytes: int = 0
    """If positive: what arrives last, up to this size, travels by itself. Nothing is left to hide the last reduction
    behind, so the less is in it the better."""

    def __post_init__(self) -> None:
        for cap in (self.bucket_bytes, self.first_bucket_bytes, *self.per_bucket_bytes):
            if cap <= 0:
                raise ValueError(f"a bucket's cap must be a positive number of bytes, got {cap}")

    def cap(self, number: int) -> int:
        if self.per_bucket_bytes:
            return self.per_bucket_bytes[min(number, len(self.per_bucket_bytes) - 1)]
        return self.first_bucket_bytes if number == 0 else self.bucket_bytes


@dataclass(frozen=True)
class BucketSpec:
    """The layout of one bucket: which parameters (indices), and where each one's gradient begins in the flat buffer."""

    index: int
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def plan_buckets(
    specs: Sequence[ParameterSpec], order: Sequence[int], policy: BucketPolicy, *, from_the_end: bool = False
) -> tuple[BucketSpec, ...]:
    """Buckets for gradients that arrive in `order` (a permutation of the parameters' indices).

    A bucket holds one dtype on one device; a sparse gradient travels alone. Buckets come in the order in which the last
    gradient of each arrives, which is the order in which they can leave. All ranks must call this with equal arguments.

    With `from_the_end` buckets are filled starting with the gradient that arrives last, so that the caps count from
    there: a small first cap then keeps the bucket small that everyone waits for at the end.
    """
    if sorted(order) != list(range(len(specs))):
        raise ValueError(f"order must name each of the {len(specs)} parameters once, got {list(order)}")
    position = {index: place for place, index in enumerate(order)}
    closed: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    num_closed: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in reversed(order) if from_the_end else order:
        spec = specs[index]
        if spec.sparse:
            closed.append([index])
            continue
        key = (spec.dtype, spec.device)
        members = open_buckets.setdefault(key, [])
        members.append(index)
        number = num_closed.get(key, 0)
        if sum(specs[member].num_bytes for member in members) >= policy.cap(number):
            closed.append(open_buckets.pop(key))
            num_closed[key] = number + 1
    closed.extend(open_buckets.values())
    closed.sort(key=lambda members: max(position[member] for member in members))
    if policy.last_bucket_bytes and not from_the_end:
        closed[-1:] = _without_last(closed[-1], specs, policy.last_bucket_bytes)
    return tuple(_lay_out(number, members, specs) for number, members in enumerate(closed))


def _without_last(members: list[int], specs: Sequence[ParameterSpec], last_bytes: int) -> list[list[int]]:
    """Split off the end of a bucket, where that leaves more behind than it takes."""
    num_last, taken = 0, 0
    while num_last < len(members) and taken + specs[members[-1 - num_last]].num_bytes <= last_bytes:
        num_last += 1
        taken += specs[members[-num_last]].num_bytes
    left = sum(specs[member].num_bytes for member in members) - taken
    if not num_last or left <= last_bytes:
        return [members]
    return [members[:-num_last], members[-num_last:]]


def _lay_out(number: int, members: list[int], specs: Sequence[ParameterSpec]) -> BucketSpec:
    offsets, numel = [], 0
    for member in members:
        offsets.append(numel)
        numel += specs[member].numel
    first = specs[members[0]]
    return BucketSpec(number, tuple(members), tuple(offsets), numel, first.dtype, first.device, first.sparse)
