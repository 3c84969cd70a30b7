"""Trees of per-sample tensors as rows of bytes, one row per sample, and back. Pure: no communication.

As bytes, a tree of any dtypes travels in one collective, and a backend needs to know no dtype but uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Leaf:
    """What ranks must agree on for one tensor of the tree."""

    path: str
    dtype: str
    row_shape: tuple[int, ...]
    device: str
    num_rows: int

    @property
    def is_open(self) -> bool:
        """`torch.empty(0)`: all that a rank without samples can know. It fits whatever the others have."""
        return self.num_rows == 0 and self.row_shape == ()

    def agrees(self, other: Leaf) -> bool:
        mine, theirs = (self.dtype, self.row_shape, self.device), (other.dtype, other.row_shape, other.device)
        return self.path == other.path and (self.is_open or other.is_open or mine == theirs)

    def shown(self) -> str:
        shape = ", ".join(["samples", *map(str, self.row_shape)])
        return f"{self.path} is a {self.device} tensor of {self.dtype} and shape [{shape}]"

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype.removeprefix("torch."))
        assert isinstance(found, torch.dtype)
        return found

    @property
    def row_bytes(self) -> int:
        size = self.torch_dtype.itemsize
        for extent in self.row_shape:
            size *= extent
        return size


def flatten(tree: Any, path: str) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]:
    """The leaves of nested dicts, lists and tuples with their paths, and how to build the same tree of other leaves."""
    if isinstance(tree, Mapping):
        # Sorted, as ranks may have filled their dicts in different order.
        keys = sorted(tree, key=lambda key: (type(key).__name__, repr(key)))
        found, build = _flatten_all([(tree[key], f"{path}[{key!r}]") for key in keys])

        def build_dict(leaves: list[Any]) -> Any:
            values = dict(zip(keys, build(leaves), strict=True))
            return {key: values[key] for key in tree}

        return found, build_dict
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        found, build = _flatten_all([(getattr(tree, name), f"{path}.{name}") for name in tree._fields])
        kind = type(tree)
        return found, lambda leaves: kind(*build(leaves))
    if isinstance(tree, list | tuple):
        found, build = _flatten_all([(item, f"{path}[{place}]") for place, item in enumerate(tree)])
        return found, _tuple_or_list(type(tree), build)
    return [(path, tree)], lambda leaves: leaves[0]


def _tuple_or_list(kind: type, build: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], Any]:
    return lambda leaves: tuple(build(leaves)) if issubclass(kind, tuple) else build(leaves)


def _flatten_all(items: Sequence[tuple[Any, str]]) -> tuple[list[tuple[str, Any]], Callable[[list[Any]], list[Any]]]:
    flat = [flatten(item, path) for item, path in items]
    found = [leaf for leaves, _ in flat for leaf in leaves]

    def build(leaves: list[Any]) -> list[Any]:
        built, first = [], 0
        for own, make in flat:
            built.append(make(leaves[first : first + len(own)]))
            first += len(own)
        return built

    return found, build


def checked_leaves(found: Sequence[tuple[str, Any]]) -> list[Leaf]:
    """Describe the tensors of a tree, or raise for what is not one tensor row per sample."""
    if not found:
        raise ValueError("there is no tensor in what is to be gathered")
    leaves = []
    for path, value in found:
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{path} must be a tensor, got {type(value).__name__}")
        if value.layout is not torch.strided:
            raise ValueError(f"{path} must be a dense tensor, got layout {value.layout}")
        if value.dim() == 0:
            raise ValueError(f"{path} must have one row per sample, got a tensor without dimensions: {value.item()!r}")
        leaves.append(Leaf(path, str(value.dtype), tuple(value.shape[1:]), value.device.type, value.shape[0]))
    first = leaves[0]
    for leaf in leaves:
        if leaf.num_rows != first.num_rows:
            raise ValueError(
                f"every tensor must have one row per sample, but {first.path} has {first.num_rows} and "
                f"{leaf.path} has {leaf.num_rows}"
            )
    return leaves


def first_difference(everyone: Sequence[Sequence[Leaf]]) -> str | None:
    """Where the ranks' trees differ, told alike on every rank; None where they agree."""
    for rank, theirs in enumerate(everyone):
        missing = [leaf.path for leaf in everyone[0] if leaf.path not in {other.path for other in theirs}]
        if missing:
            return f"rank 0 has {missing[0]}, rank {rank} has not"
        extra = [leaf.path for leaf in theirs if leaf.path not in {other.path for other in everyone[0]}]
        if extra:
            return f"rank {rank} has {extra[0]}, rank 0 has not"
    for place in range(len(everyone[0])):
        known = reference([leaves[place] for leaves in everyone])
        for rank, theirs in enumerate(everyone):
            if not theirs[place].agrees(known[1]):
                return f"on rank {known[0]} {known[1].shown()}, on rank {rank} {theirs[place].shown()}"
    return None


def reference(leaves: Sequence[Leaf]) -> tuple[int, Leaf]:
    """The first rank that knows dtype and shape of a leaf, and what it knows."""
    return next(((rank, leaf) for rank, leaf in enumerate(leaves) if not leaf.is_open), (0, leaves[0]))


def pack(tensors: Sequence[torch.Tensor], leaves: Sequence[Leaf], device: torch.device) -> torch.Tensor:
    """One row of bytes per sample. `leaves` says what is agreed; open tensors have no rows to convert."""
    num_rows = tensors[0].shape[0]
    columns = []
    for tensor, leaf in zip(tensors, leaves, strict=True):
        flat = tensor.detach().resolve_conj().resolve_neg().to(device).reshape(-1)
        if flat.numel() and flat.stride(0) != 1:  # which a single element may have, and count as contiguous
            flat = flat.clone(memory_format=torch.contiguous_format)
        columns.append(flat.view(torch.uint8).view(num_rows, leaf.row_bytes) if num_rows else _nothing(leaf, device))
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _nothing(leaf: Leaf, device: torch.device) -> torch.Tensor:
    return torch.empty((0, leaf.row_bytes), dtype=torch.uint8, device=device)


def unpack(rows: torch.Tensor, leaves: Sequence[Leaf], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    found, first = [], 0
    for leaf, device in zip(leaves, devices, strict=True):
        # Cloned, since a column of a single row counts as contiguous where it lies, which may be at an odd address.
        column = rows[:, first : first + leaf.row_bytes].clone(memory_format=torch.contiguous_format).reshape(-1)
        first += leaf.row_bytes
        found.append(column.view(leaf.torch_dtype).view(rows.shape[0], *leaf.row_shape).to(device))
    return found


def interleaved(counts: Sequence[int]) -> torch.Tensor:
    """Where rows that lie rank after rank come from when ranks take turns, as an unpadded order is dealt to them."""
    size = len(counts)
    keys = [torch.arange(count, dtype=torch.int64, device="cpu") * size + rank for rank, count in enumerate(counts)]
    return torch.cat(keys).argsort()


def by_index(indices: torch.Tensor) -> torch.Tensor:
    """Where rows come from when sorted by the dataset's index, each index once."""
    ordered, origin = torch.sort(indices, stable=True)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return origin[is_first]
