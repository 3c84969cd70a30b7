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
    last_bucket_share: float = 0.0
    """But only where it holds at least this share of all gradients, by number: the more, the earlier the rest leaves."""
    alone_bytes: int = 0
    """If positive: a gradient of at least this size travels by itself, so that none has to wait for it."""
    least_bytes: int = 0
    """What is left over at the end, if less than this, is not worth a collective of its own. It goes with the last bucket
    before it, or with a large gradient that comes later than that one is full."""

    def __post_init__(self) -> None:
        for cap in (self.bucket_bytes, self.first_bucket_bytes, *self.per_bucket_bytes):
            if cap <= 0:
                raise ValueError(f"a bucket's cap must be a positive number of bytes, got {cap}")

    def cap(self, number: int) -> int:
        if self.per_bucket_bytes:
            return self.per_bucket_bytes[min(number, len(self.per_bucket_bytes) - 1)]
        return self.first_bucket_bytes if number == 0 else self.bucket_bytes


def default_policy(device_type: str, total_bytes: int, *, small_bytes: int = MIB) -> BucketPolicy:
    """For gradients of this size in all: on the CPU buckets of 25 MiB and a small first one, to start early, as in torch.

    On a GPU, whose links are fast, it is the host that a collective costs most: a third of all, at most 160 MiB, so that
    few are started and only the last third has nothing left to hide behind; what is as large as half of that is alone.
    A small first one would be a start more for a hundredth of what there is to send, and so would one for a rest. A small
    last one, on either, lets what comes before it leave while the first layers are under way: that is long in a conv net,
    where they are many for their size, and on a GPU not worth a start where they are few of many.
    """
    if device_type == "cpu":
        cap = 25 * MIB
        small = min(small_bytes, cap)
        return BucketPolicy(cap, small, last_bucket_bytes=small)
    cap = min(max(25 * MIB, total_bytes // 3), 160 * MIB)
    last = min(small_bytes, cap)
    return BucketPolicy(
        cap, cap, last_bucket_bytes=last, last_bucket_share=0.05, alone_bytes=cap // 2, least_bytes=cap // 4
    )


def default_policy_for(parts: Sequence[torch.Tensor], *, small_bytes: int = MIB) -> BucketPolicy:
    """For the gradients of these, which are what this rank holds of its parameters."""
    kinds = {part.device.type for part in parts} - {"cpu"}
    total = sum(part.numel() * part.element_size() for part in parts)
    return default_policy(kinds.pop() if kinds else "cpu", total, small_bytes=small_bytes)


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
    kinds: dict[_Kind, list[list[int]]] = {}  # the last of each is still open
    sizes: dict[_Kind, int] = {}  # of that one
    alone: list[list[int]] = []
    for index in reversed(order) if from_the_end else order:
        spec = specs[index]
        if spec.sparse or 0 < policy.alone_bytes <= spec.num_bytes:
            alone.append([index])
            continue
        key = _kind(spec)
        of_kind = kinds.setdefault(key, [[]])
        of_kind[-1].append(index)
        sizes[key] = sizes.get(key, 0) + spec.num_bytes
        if sizes[key] >= policy.cap(len(of_kind) - 1):
            of_kind.append([])
            sizes[key] = 0

    def full_at(members: list[int]) -> int:
        return max(position[member] for member in members)

    closed = list(alone)
    for key, of_kind in kinds.items():
        rest = of_kind.pop()
        host = None
        if rest and sizes[key] < policy.least_bytes and not from_the_end:
            since = full_at(of_kind[-1]) if of_kind else position[rest[0]]
            later = [large for large in alone if _kind(specs[large[0]]) == key and full_at(large) > since]
            host = max(of_kind[-1:] + later, key=full_at, default=None)
        if host is not None:
            host[:] = sorted(host + rest, key=position.__getitem__)
        elif rest:
            of_kind.append(rest)
        closed += of_kind
    closed.sort(key=full_at)
    if policy.last_bucket_bytes and not from_the_end and closed:
        closed[-1:] = _without_last(closed[-1], specs, policy)
        closed.sort(key=full_at)  # what is left of it may be full before one that is alone
    return tuple(_lay_out(number, members, specs) for number, members in enumerate(closed))


_Kind = tuple[torch.dtype, torch.device, bool]


def _kind(spec: ParameterSpec) -> _Kind:
    """What the gradients of a bucket have in common."""
    return spec.dtype, spec.device, spec.sparse


def _without_last(members: list[int], specs: Sequence[ParameterSpec], policy: BucketPolicy) -> list[list[int]]:
    """Split off the end of a bucket, where that leaves more behind than it takes, and takes enough of all."""
    num_last, taken = 0, 0
    while num_last < len(members) and taken + specs[members[-1 - num_last]].num_bytes <= policy.last_bucket_bytes:
        num_last += 1
        taken += specs[members[-num_last]].num_bytes
    left = sum(specs[member].num_bytes for member in members) - taken
    if not num_last or left <= policy.last_bucket_bytes or num_last < policy.last_bucket_share * len(specs):
        return [members]
    return [members[:-num_last], members[-num_last:]]


def _lay_out(number: int, members: list[int], specs: Sequence[ParameterSpec]) -> BucketSpec:
    offsets, numel = [], 0
    for member in members:
        offsets.append(numel)
        numel += specs[member].numel
    first = specs[members[0]]
    return BucketSpec(number, tuple(members), tuple(offsets), numel, first.dtype, first.device, first.sparse)
