"""What ranks tell each other in the last bucket's tail: what each writes, everyone reads, after a sum or an average."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.reducer.unused import ControlBlock, Flag


@dataclass(frozen=True)
class Said:
    used: list[bool] | None
    late: list[int]
    weight: float
    flags: Flag


@st.composite
def ranks_say(draw: st.DrawFn) -> tuple[int, int, list[Said]]:
    num_parameters, num_buckets = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    said = [
        Said(
            draw(st.none() | st.lists(st.booleans(), min_size=num_parameters, max_size=num_parameters)),
            draw(st.lists(st.integers(0, num_buckets - 1), unique=True)),
            draw(st.integers(0, 1 << 20).map(float)),
            Flag(draw(st.integers(0, 15))),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    return num_parameters, num_buckets, said


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(case=ranks_say())
def test_what_each_rank_writes_everyone_reads(
    dtype: torch.dtype, averaged: bool, case: tuple[int, int, list[Said]]
) -> None:
    num_parameters, num_buckets, said = case
    size = len(said)
    blocks = [
        ControlBlock(num_parameters=num_parameters, num_buckets=num_buckets, rank=rank, size=size)
        for rank in range(size)
    ]
    total = torch.zeros(blocks[0].length, dtype=dtype)
    for block, words in zip(blocks, said, strict=True):
        tail = torch.full((block.length,), float("nan"), dtype=dtype)  # whatever was there is overwritten
        block.write(tail, used=words.used, late=words.late, weight=words.weight, flags=words.flags)
        total += tail
    if averaged:
        total /= size
    report = blocks[0].read(total, averaged=averaged)
    counts = [sum(1 for w in said if w.used is None or w.used[i]) for i in range(num_parameters)]
    if all(count == size for count in counts):
        assert report.used is None
    else:
        assert report.used == counts
    assert report.late == sorted({bucket for words in said for bucket in words.late})
    assert report.weights == pytest.approx([words.weight for words in said], rel=1e-6)
    assert report.flags == [words.flags for words in said]
    for flag in Flag:
        assert report.ranks_with(flag) == [rank for rank, words in enumerate(said) if flag & words.flags]


def test_the_common_case_writes_the_same_every_time() -> None:
    block = ControlBlock(num_parameters=3, num_buckets=2, rank=1, size=2)
    first, second = torch.empty(block.length), torch.empty(block.length)
    for flags in (Flag(0), Flag.TRAINING, Flag(0)):
        block.write(first, used=None, late=(), weight=1.0, flags=flags)
        block.write(second, used=[True] * 3, late=[], weight=1.0, flags=flags)
        assert torch.equal(first, second)
