"""Trees of per-sample tensors as rows of bytes, and their order."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.rows import by_index, checked_leaves, first_difference, flatten, interleaved, pack, unpack
from phalanx.data.share import Share

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


def _there_and_back(tree: Any) -> Any:
    found, build = flatten(tree, "values")
    tensors = [tensor for _, tensor in found]
    leaves = checked_leaves(found)
    return build(unpack(pack(tensors, leaves, CPU), leaves, [CPU] * len(tensors)))


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_any_tree_and_dtype_comes_back(num_rows: int) -> None:
    noise = torch.randn(num_rows, 4, 2)
    tree = {
        "z": noise,
        "a": [noise[:, 0, 0].bfloat16(), (noise > 0, noise.to(torch.complex64).conj())],
        3: Pair(noise.double().transpose(1, 2), (noise * 9).to(torch.int8)),
        "none": noise[:, :0],
    }
    back = _there_and_back(tree)
    assert list(back) == list(tree) and isinstance(back[3], Pair) and isinstance(back["a"][1], tuple)
    pairs = list(zip(flatten(tree, "")[0], flatten(back, "")[0], strict=True))
    assert len(pairs) == 7
    for (_, before), (_, after) in pairs:
        assert torch.equal(before, after) and before.dtype == after.dtype and before.shape == after.shape


def test_dicts_filled_in_another_order_are_the_same_tree() -> None:
    one, other = {"a": torch.ones(1), "b": torch.zeros(1)}, {"b": torch.zeros(1), "a": torch.ones(1)}
    assert [path for path, _ in flatten(one, "v")[0]] == [path for path, _ in flatten(other, "v")[0]]


@pytest.mark.parametrize(
    "tree, expected",
    [
        ({}, "no tensor"),
        ({"loss": torch.tensor(2.5)}, r"values\['loss'\] must have one row per sample.* 2\.5"),
        ([torch.ones(2), 3], r"values\[1\] must be a tensor, got int"),
        ([torch.ones(2), torch.ones(3)], r"values\[0\] has 2 and values\[1\] has 3"),
        (torch.ones(2, 2).to_sparse(), "dense"),
    ],
)
def test_what_has_no_rows_is_refused(tree: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        checked_leaves(flatten(tree, "values")[0])


def _leaves(tree: Any) -> Any:
    return checked_leaves(flatten(tree, "values")[0])


@pytest.mark.parametrize(
    "one, other, expected",
    [
        (torch.ones(2), torch.ones(3), None),
        (torch.ones(2, 3), torch.empty(0), None),
        (
            torch.ones(2),
            torch.ones(2).double(),
            r"on rank 0 values is a cpu tensor of torch.float32 .* on rank 1 .*float64",
        ),
        (torch.ones(2, 3), torch.ones(2, 4), r"shape \[samples, 3\], on rank 1 .* shape \[samples, 4\]"),
        (torch.empty(0, 3), torch.ones(2, 4), r"shape \[samples, 3\], on rank 1 .* shape \[samples, 4\]"),
        ({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}, r"rank 0 has values\['b'\], rank 1 has not"),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], r"rank 1 has values\[1\], rank 0 has not"),
    ],
)
def test_differences_are_told(one: Any, other: Any, expected: str | None) -> None:
    told = first_difference([_leaves(one), _leaves(other)])
    if expected is None:
        assert told is None
    else:
        with pytest.raises(ValueError, match=expected):
            raise ValueError(told)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7), st.data())
def test_unpadded_shares_interleave_to_the_order_they_were_cut_from(
    n: int, world_size: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, n))
    order = torch.randperm(n)
    parts = [Share(n, start, world_size, rank, "keep").indices(order) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts)[interleaved([len(part) for part in parts])], order[start:])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 7))
def test_padded_shares_sort_to_the_dataset_without_duplicates(n: int, world_size: int) -> None:
    order = torch.randperm(n)
    rows = torch.cat([Share(n, 0, world_size, rank, "pad").indices(order) for rank in range(world_size)])
    assert rows[by_index(rows)].tolist() == list(range(n))
