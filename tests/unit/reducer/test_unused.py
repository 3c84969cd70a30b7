"""What ranks tell each other in the last bucket's tail: what each writes, everyone reads, after a sum or an average."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.reducer.unused import ControlBlock, Digits, Flag


@dataclass(frozen=True)
class Said:
    used: list[bool] | None
    late: list[int]
    weight: float
    flags: int


@st.composite
def ranks_say(draw: st.DrawFn) -> tuple[int, int, list[Said]]:
    num_parameters, num_buckets = draw(st.integers(0, 60)), draw(st.integers(1, 4))
    said = [
        Said(
            draw(st.none() | st.lists(st.booleans(), min_size=num_parameters, max_size=num_parameters)),
            draw(st.lists(st.integers(0, num_buckets - 1), unique=True)),
            draw(st.integers(0, 1 << 20).map(float)),
            draw(st.integers(0, 63)),
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
        ControlBlock(num_parameters=num_parameters, num_buckets=num_buckets, rank=rank, size=size, dtype=dtype)
        for rank in range(size)
    ]
    total = torch.zeros(blocks[0].length, dtype=dtype)
    for block, words in zip(blocks, said, strict=True):
        tail = torch.full((block.length,), float("nan"), dtype=dtype)  # whatever was there is overwritten
        block.write(tail, used=words.used, late=words.late, weight=words.weight, flags=words.flags)
        total += tail
    if averaged:
        total /= size
    report = blocks[0].read(total.tolist(), averaged=averaged)
    counts = [sum(1 for w in said if w.used is None or w.used[i]) for i in range(num_parameters)]
    if all(count == size for count in counts):
        assert report.used is None
    else:
        assert report.used == counts
    assert report.late == sorted({bucket for words in said for bucket in words.late})
    weights = [words.weight if words.flags & (Flag.WEIGHTED | Flag.OUT) else 1.0 for words in said]
    assert report.weights == pytest.approx(weights, rel=1e-6)
    assert report.flags == [words.flags for words in said]
    for flag in (Flag.WEIGHTED, Flag.FAILED, Flag.CHANGED, Flag.EVALUATING, Flag.LAST, Flag.OUT):
        assert report.has(flag) == any(flag & words.flags for words in said)
        assert report.ranks_with(flag) == [rank for rank, words in enumerate(said) if flag & words.flags]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100, 1023, 4096])
def test_every_count_up_to_all_ranks_is_read_also_from_an_average(size: int, dtype: torch.dtype) -> None:
    digits = Digits(base=size + 1, dtype=dtype)
    counts = [0, size, 1, size, size - 1, size // 2] * 9
    total = [0.0] * digits.num_numbers(len(counts))
    for rank in range(size):
        mine = [0.0] * len(total)
        for index, count in enumerate(counts):
            if rank < count:
                digits.add_one(mine, index)
        total = [a + b for a, b in zip(total, mine, strict=True)]
    expected = {index: count for index, count in enumerate(counts) if count}
    assert digits.read(total) == expected
    averaged = torch.tensor(total, dtype=dtype) / size
    assert digits.read([number * size for number in averaged.tolist()]) == expected


@pytest.mark.parametrize("size", [2, 3, 7, 8, 84, 88, 100, 255, 1000])
def test_counts_survive_an_average_of_which_every_addition_rounds(size: int) -> None:
    """As NCCL averages: each rank's number is divided first, and then they are added up, one after the other."""
    digits = Digits(base=size + 1, dtype=torch.float32)
    source = random.Random(size)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0, None):
        used_by = [
            [source.random() < (source.random() if share is None else share) for _ in range(40)] for _ in range(size)
        ]
        total = torch.zeros(digits.num_numbers(40))
        for row in used_by:
            mine = [0.0] * len(total)
            for index, says_so in enumerate(row):
                if says_so:
                    digits.add_one(mine, index)
            total += torch.tensor(mine) * torch.tensor(1 / size)
        counts = [sum(column) for column in zip(*used_by, strict=True)]
        assert digits.read([number * size for number in total.tolist()]) == {i: n for i, n in enumerate(counts) if n}


def test_a_tail_is_short_beside_many_small_parameters() -> None:
    lengths = {size: ControlBlock(num_parameters=5000, num_buckets=1, rank=0, size=size).length for size in (1, 8, 64)}
    assert lengths == {1: 242, 8: 1017, 64: 2629}


def test_the_common_case_is_zero_however_it_is_said() -> None:
    block = ControlBlock(num_parameters=3, num_buckets=2, rank=1, size=2)
    first, second = torch.empty(block.length), torch.empty(block.length)
    for flags in (Flag.NONE, Flag.EVALUATING, Flag.NONE):
        block.write(first, used=None, late=(), weight=1.0, flags=flags)
        block.write(second, used=[True] * 3, late=[], weight=1.0, flags=flags)
        assert torch.equal(first, second)
    assert not first.any()


def test_what_was_left_zero_is_not_written_again() -> None:
    block = ControlBlock(num_parameters=3, num_buckets=2, rank=1, size=2)
    tail = torch.full((block.length,), float("nan"))

    def say(flags: int = Flag.NONE, used: list[bool] | None = None) -> bool:
        """Whether it was written."""
        version = tail._version
        if flags or used:
            block.write(tail, used=used, late=(), weight=1.0, flags=flags)
        else:
            block.write_nothing(tail)
        return tail._version != version

    def hear() -> bool:
        return block.is_usual(tail, block.num_written)

    assert say()  # nobody knows yet what lies there
    assert say()  # nor how that step ended
    assert hear()
    assert not say()
    assert say()  # the last was not heard of: it may have been broken off
    tail[-2] = float(Flag.FAILED)  # the other rank's
    assert not hear()
    assert say() and not tail.any()
    assert hear()
    assert say(used=[True, False, True]) and not hear()
    assert say() and hear()
    assert say(Flag.EVALUATING) and not hear()
    assert say() and hear()
    block.note_capture()
    for _ in range(2):
        assert say() and hear()


def test_an_answer_that_was_overtaken_says_nothing_of_the_tail() -> None:
    block = ControlBlock(num_parameters=1, num_buckets=1, rank=0, size=1)
    tail = torch.zeros(block.length)
    block.write_nothing(tail)
    copied, then = tail.clone(), block.num_written
    block.write(tail, used=[False], late=(), weight=1.0, flags=Flag.NONE)
    assert block.is_usual(copied, then)
    block.write_nothing(tail)
    assert not tail.any()
