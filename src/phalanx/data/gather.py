"""`gather_exact`: what the ranks computed per sample, together again in the dataset's order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.comm.c10d import C10dGroup, group_of
from phalanx.data.rows import (
    Leaf,
    by_index,
    checked_leaves,
    first_difference,
    flatten,
    interleaved,
    pack,
    reference,
    unpack,
)
from phalanx.data.sampler import DistributedSampler

_INDICES = "indices"


def gather_exact(
    values: Any,
    *,
    sampler: DistributedSampler | None = None,
    indices: torch.Tensor | Sequence[int] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Gather per-sample tensors of unequal length: the result has one row per sample, in the dataset's order.

    Every rank of the group calls it, with tensors (or nested dicts, lists and tuples of them) that have one row per
    sample of this rank; ranks may differ in the number of rows, and have none. Structure, dtypes, devices and the shape of
    a row must agree; a rank without samples may pass ``torch.empty(0)``. Where ranks disagree, or one has an error, every
    rank raises the same ValueError.

    By default ranks take turns, which is the dataset's order for a sampler with ``shuffle=False, pad=False``. For any other
    sampler pass it as `sampler` after one iteration over it, or pass the dataset's `indices` of the rows: the result is
    sorted by them, and rows of padding are left out. With `dst`, a rank of the job, that rank gets the result and the
    others None. Results carry no gradient.
    """
    process_group = group if group is not None else distributed_c10d._get_default_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError("this rank is not in the group that it is to gather in")
    carrier = group_of(process_group)
    offer, tensors, build = _offered(values, sampler, indices, dst, process_group)
    everyone = _agreed(carrier, offer, _device_for(process_group, "cpu"))
    leaves = [reference(same)[1] for same in zip(*(part.leaves for part in everyone), strict=True)]
    counts = [part.num_rows for part in everyone]
    # All travel together, on the device where most of the bytes are.
    device = _device_for(process_group, max(leaves, key=lambda leaf: leaf.row_bytes).device)
    rows = _gathered(carrier, pack(tensors, leaves, device), counts, dst)
    if rows is None:
        return None
    parts = unpack(rows, leaves, [tensor.device for tensor in tensors])
    origin = by_index(parts.pop()) if leaves[-1].path == _INDICES else interleaved(counts)
    return build([part[origin.to(part.device)] for part in parts])


@dataclass(frozen=True)
class _Offer:
    """What a rank comes with. Ranks compare these before any row travels."""

    leaves: tuple[Leaf, ...]
    num_rows: int
    dst: int | None
    problem: str | None = None

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, said: bytes) -> _Offer:
        parts = json.loads(said)
        leaves = tuple(Leaf(**{**leaf, "row_shape": tuple(leaf["row_shape"])}) for leaf in parts["leaves"])
        return cls(**{**parts, "leaves": leaves})

    def digest(self) -> list[int]:
        """Two numbers that are equal where nothing differs but the number of rows."""
        alike = replace(self, num_rows=0, leaves=tuple(replace(leaf, num_rows=0) for leaf in self.leaves))
        whole = hashlib.sha256(alike.encoded()).digest()
        return [int.from_bytes(whole[first : first + 8], "little", signed=True) for first in (0, 8)]


def _offered(
    values: Any,
    sampler: DistributedSampler | None,
    indices: torch.Tensor | Sequence[int] | None,
    dst: int | None,
    process_group: dist.ProcessGroup,
) -> tuple[_Offer, list[torch.Tensor], Callable[[list[Any]], Any]]:
    """This rank's offer. Its own mistake is part of it: the others wait for this rank, and must learn of it."""
    found, build = flatten(values, "values")
    try:
        leaves = checked_leaves(found)
        if sampler is not None or indices is not None:
            own = _indices_of(sampler, indices, leaves[0].num_rows)
            found.append((_INDICES, own))
            leaves.append(Leaf(_INDICES, str(own.dtype), (), own.device.type, len(own)))
        members = dist.get_process_group_ranks(process_group)
        if dst is not None and dst not in members:
            raise ValueError(f"dst must be one of the group's ranks {members}, got {dst!r}")
    except (ValueError, TypeError) as error:
        return _Offer((), 0, None, problem=str(error)), [], build
    return _Offer(tuple(leaves), leaves[0].num_rows, dst), [tensor for _, tensor in found], build


def _indices_of(
    sampler: DistributedSampler | None, indices: torch.Tensor | Sequence[int] | None, num_rows: int
) -> torch.Tensor:
    if sampler is not None and indices is not None:
        raise ValueError("both sampler and indices are given: one of them says which samples the rows are")
    if sampler is not None:
        if not isinstance(sampler, DistributedSampler):
            raise ValueError(
                f"sampler must be a phalanx.DistributedSampler, got {type(sampler).__name__}: pass indices"
            )
        own = sampler.indices()
        if len(own) != num_rows:
            raise ValueError(
                f"there are {num_rows} rows, but the sampler's iteration has {len(own)} samples of this rank"
            )
        return own
    if indices is None or not len(indices):
        own = torch.empty(0, dtype=torch.int64, device="cpu")
    else:
        own = torch.as_tensor(indices, device="cpu")
    if own.dim() != 1 or own.is_floating_point() or own.is_complex() or own.dtype == torch.bool:
        raise ValueError(f"indices must be integers, one per row, got {own.dtype} of shape {list(own.shape)}")
    if len(own) != num_rows:
        raise ValueError(f"there are {num_rows} rows, but {len(own)} indices")
    return own.to("cpu", torch.int64)


def _agreed(carrier: C10dGroup, offer: _Offer, device: torch.device) -> list[_Offer]:
    """Every rank's offer, if they fit together; the same ValueError on all ranks if not.

    Ranks that agree send four numbers. Only where digests differ do they send more: to say how, or because a rank without
    samples knows neither dtype nor shape.
    """
    said = offer.encoded()
    header = torch.tensor([*offer.digest(), offer.num_rows, len(said)], dtype=torch.int64, device=device)
    headers = [carrier.read(part) for part in _all_gathered(carrier, header)]
    if all(part[:2] == headers[0][:2] for part in headers):
        everyone = [replace(offer, num_rows=part[2]) for part in headers]
    else:
        padded = torch.zeros(max(part[3] for part in headers), dtype=torch.uint8, device=device)
        padded[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(device)
        texts = [bytes(carrier.read(part)) for part in _all_gathered(carrier, padded)]
        everyone = [_Offer.decoded(text[: part[3]]) for text, part in zip(texts, headers, strict=True)]
    for rank, theirs in enumerate(everyone):
        if theirs.problem is not None:
            raise ValueError(f"gather_exact on rank {rank}: {theirs.problem}")
    for rank, theirs in enumerate(everyone):
        if theirs.dst != everyone[0].dst:
            raise ValueError(f"gather_exact: rank 0 has dst={everyone[0].dst}, rank {rank} has dst={theirs.dst}")
    difference = first_difference([theirs.leaves for theirs in everyone])
    if difference is not None:
        raise ValueError(f"gather_exact: ranks must pass the same tree of tensors, but {difference}")
    return everyone


def _gathered(carrier: C10dGroup, mine: torch.Tensor, counts: Sequence[int], dst: int | None) -> torch.Tensor | None:
    """All ranks' rows, rank after rank; None where they go to another rank."""
    is_wanted = dst is None or dst == dist.get_rank()
    longest = max(counts)
    if longest * mine.shape[1] == 0:  # no byte to send, which all ranks know
        return mine.new_empty((sum(counts), mine.shape[1])) if is_wanted else None
    # Collectives that every backend has want equal sizes: rows are padded to the longest, and what is padding is cut off.
    padded = torch.cat([mine, mine.new_zeros((longest - len(mine), mine.shape[1]))]) if len(mine) < longest else mine
    if dst is None:
        received = _all_gathered(carrier, padded)
    else:
        received = [torch.empty_like(padded) for _ in counts] if is_wanted else []
        try:
            dist.gather(padded, received if is_wanted else None, dst=dst, group=carrier.process_group)
        except RuntimeError as error:
            raise carrier.explain(error, "gather") from error
    carrier.mark(padded.device)
    return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)]) if is_wanted else None


def _all_gathered(carrier: C10dGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    received = [torch.empty_like(tensor) for _ in range(carrier.size)]
    carrier.all_gather(received, tensor.contiguous()).wait()
    return received


def _device_for(process_group: dist.ProcessGroup, wanted: str) -> torch.device:
    """A device that the group's collectives take: of the wanted type if they do, else of one that they take."""
    known = [device.type for device in process_group._device_types]
    chosen = wanted if wanted in known or not known else known[0]
    return torch.device(chosen, torch.cuda.current_device()) if chosen == "cuda" else torch.device(chosen)
