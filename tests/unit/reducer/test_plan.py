"""Which gradients travel together: properties of the plan, for any parameters and any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.reducer.plan import MIB, BucketPolicy, ParameterSpec, default_policy, plan_buckets

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@st.composite
def parameters(draw: st.DrawFn) -> tuple[list[ParameterSpec], list[int], BucketPolicy]:
    count = draw(st.integers(0, 12))
    specs = [
        ParameterSpec(
            f"p{index}",
            (draw(st.integers(0, 40)),),
            (1,),
            draw(st.sampled_from(DTYPES)),
            torch.device("cpu"),
            sparse=draw(st.integers(0, 5)) == 0,
        )
        for index in range(count)
    ]
    order = draw(st.permutations(range(count)))
    caps = draw(st.lists(st.integers(1, 400), max_size=3))
    policy = BucketPolicy(
        draw(st.integers(1, 400)),
        draw(st.integers(1, 400)),
        tuple(caps),
        last_bucket_bytes=draw(st.integers(0, 100)),
        alone_bytes=draw(st.integers(0, 400)),
        least_bytes=draw(st.integers(0, 200)),
    )
    return specs, list(order), policy


@given(parameters())
def test_every_parameter_is_in_exactly_one_bucket(case: tuple[list[ParameterSpec], list[int], BucketPolicy]) -> None:
    specs, order, policy = case
    buckets = plan_buckets(specs, order, policy)
    assert sorted(index for bucket in buckets for index in bucket.parameters) == list(range(len(specs)))
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))


@given(parameters())
def test_a_bucket_holds_one_kind_and_a_sparse_gradient_travels_alone(
    case: tuple[list[ParameterSpec], list[int], BucketPolicy],
) -> None:
    specs, order, policy = case
    for bucket in plan_buckets(specs, order, policy):
        members = [specs[index] for index in bucket.parameters]
        assert {(m.dtype, m.device, m.sparse) for m in members} == {(bucket.dtype, bucket.device, bucket.sparse)}
        assert not bucket.sparse or len(members) == 1


@given(parameters())
def test_gradients_lie_side_by_side(case: tuple[list[ParameterSpec], list[int], BucketPolicy]) -> None:
    specs, order, policy = case
    for bucket in plan_buckets(specs, order, policy):
        end = 0
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert offset == end
            end += specs[index].numel
        assert bucket.numel == end
        assert bucket.num_bytes == end * bucket.dtype.itemsize


@given(parameters())
def test_buckets_leave_in_the_order_in_which_they_are_full(
    case: tuple[list[ParameterSpec], list[int], BucketPolicy],
) -> None:
    specs, order, policy = case
    place = {index: at for at, index in enumerate(order)}
    buckets = plan_buckets(specs, order, policy)
    full_at = [max(place[index] for index in bucket.parameters) for bucket in buckets]
    assert full_at == sorted(full_at)
    for bucket in buckets:
        assert [place[index] for index in bucket.parameters] == sorted(place[index] for index in bucket.parameters)


@given(parameters())
def test_a_bucket_exceeds_its_cap_by_its_last_gradient_at_most(
    case: tuple[list[ParameterSpec], list[int], BucketPolicy],
) -> None:
    specs, order, policy = case
    largest = max((policy.bucket_bytes, policy.first_bucket_bytes, *policy.per_bucket_bytes))
    for bucket in plan_buckets(specs, order, replace(policy, least_bytes=0)):
        if not bucket.sparse:
            assert sum(specs[index].num_bytes for index in bucket.parameters[:-1]) < largest


@given(parameters())
def test_the_plan_is_a_function_of_its_arguments(case: tuple[list[ParameterSpec], list[int], BucketPolicy]) -> None:
    assert plan_buckets(*case) == plan_buckets(*case)


def _spec(name: str, numel: int, **more: object) -> ParameterSpec:
    return ParameterSpec(name, (numel,), (1,), torch.float32, torch.device("cpu"), **more)  # type: ignore[arg-type]


def test_the_first_bucket_is_small() -> None:
    specs = [_spec(f"p{i}", 10) for i in range(6)]
    buckets = plan_buckets(specs, range(6), BucketPolicy(bucket_bytes=120, first_bucket_bytes=40))
    assert [bucket.parameters for bucket in buckets] == [(0,), (1, 2, 3), (4, 5)]


def test_caps_by_bucket_and_the_last_one_for_the_rest() -> None:
    specs = [_spec(f"p{i}", 10) for i in range(6)]
    buckets = plan_buckets(specs, range(6), BucketPolicy(per_bucket_bytes=(40, 80)))
    assert [bucket.parameters for bucket in buckets] == [(0,), (1, 2), (3, 4), (5,)]


def test_the_defaults_are_torchs() -> None:
    assert BucketPolicy() == BucketPolicy(25 * MIB, MIB)


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 1, 2], [1, 2]])
def test_an_order_that_is_no_permutation(order: list[int]) -> None:
    with pytest.raises(ValueError, match="each of the 2 parameters once"):
        plan_buckets([_spec("a", 1), _spec("b", 1)], order, BucketPolicy())


@pytest.mark.parametrize("caps", [(0, 1, ()), (1, -1, ()), (1, 1, (4, 0))])
def test_caps_are_positive(caps: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        BucketPolicy(*caps)


def test_a_spec_knows_its_size() -> None:
    spec = ParameterSpec.of("w", torch.empty(2, 3, dtype=torch.complex64).t())
    assert (spec.numel, spec.num_bytes, spec.shape, spec.stride) == (6, 48, (3, 2), (1, 3))
    assert ParameterSpec.of("s", torch.empty(())).numel == 1
    assert ParameterSpec.of("z", torch.empty(0, 4)).num_bytes == 0


def test_what_arrives_last_travels_by_itself() -> None:
    specs = [_spec("a", 100), _spec("b", 100), _spec("c", 1000), _spec("d", 5000)]
    plain = plan_buckets(specs, [3, 2, 1, 0], BucketPolicy(10**6, 10**6))
    assert [bucket.parameters for bucket in plain] == [(3, 2, 1, 0)]
    split = plan_buckets(specs, [3, 2, 1, 0], BucketPolicy(10**6, 10**6, last_bucket_bytes=1000))
    assert [bucket.parameters for bucket in split] == [(3, 2), (1, 0)]


def test_nothing_is_split_off_a_small_bucket_or_a_large_last_gradient() -> None:
    policy = BucketPolicy(10**6, 10**6, last_bucket_bytes=1000)
    small = [_spec("a", 100), _spec("b", 100)]
    assert len(plan_buckets(small, [1, 0], policy)) == 1
    embedding = [_spec("a", 10000), _spec("b", 100)]
    assert len(plan_buckets(embedding, [1, 0], policy)) == 1


def test_a_large_gradient_travels_alone_and_the_others_do_not_wait_for_it() -> None:
    specs = [_spec("a", 10), _spec("large", 100), _spec("b", 10), _spec("c", 10)]
    buckets = plan_buckets(specs, range(4), BucketPolicy(200, 200, alone_bytes=400))
    assert [bucket.parameters for bucket in buckets] == [(1,), (0, 2, 3)]
    assert len(plan_buckets(specs, range(4), BucketPolicy(2000, 2000))) == 1


def _sizes(mebibytes: list[float], kind: str) -> list[float]:
    """How large the buckets are by default, in MiB, for gradients that arrive in this order."""
    specs = [_spec(f"p{i}", int(size * MIB) // 4) for i, size in enumerate(mebibytes)]
    policy = default_policy(kind, sum(spec.num_bytes for spec in specs))
    return [bucket.num_bytes / MIB for bucket in plan_buckets(specs, range(len(specs)), policy)]


def test_on_a_gpu_buckets_are_a_third_of_all() -> None:
    layers = [0.25] * 500
    assert _sizes(layers, "cpu") == [1.0, *[25.0] * 4, 23.0, 1.0]
    assert _sizes(layers, "cuda") == [41.75, 41.75, 41.5]


def test_on_a_gpu_what_arrives_last_travels_by_itself_where_it_is_many_gradients() -> None:
    """A conv net: its first layers are small, and take long."""
    assert _sizes([10.0] * 6 + [0.125] * 8, "cuda") == [30.0, 30.0, 1.0]
    assert _sizes([2.0] * 96 + [0.25] * 4, "cuda") == [66.0, 66.0, 61.0]
    assert _sizes([2.0] * 96 + [0.125] * 6, "cuda") == [66.0, 66.0, 60.0, 0.75]


def test_on_a_gpu_a_small_model_has_buckets_of_25_mib_and_a_large_one_of_no_more_than_160() -> None:
    assert _sizes([1.0] * 30, "cpu") == [1.0, 25.0, 3.0, 1.0]
    assert _sizes([1.0] * 30, "cuda") == [30.0]
    assert _sizes([1.0] * 33, "cuda") == [25.0, 8.0]
    assert _sizes([1.25], "cuda") == [1.25]
    assert _sizes([16.0] * 100, "cuda") == [160.0] * 10


def test_on_a_gpu_a_tied_embedding_that_arrives_last_is_not_waited_for() -> None:
    """GPT-2 small: twelve blocks, and then what input and output share."""
    assert _sizes([27.0] * 12 + [1.5, 147.0], "cuda") == [162.0, 162.0, 148.5]
    assert _sizes([27.0] * 12 + [147.0, 1.5], "cuda") == [162.0, 162.0, 148.5]


def test_on_a_gpu_a_large_gradient_that_comes_first_does_not_wait_for_a_small_rest() -> None:
    assert _sizes([147.0] + [1.0] * 6, "cuda") == [147.0, 5.0, 1.0]


def test_a_small_rest_goes_with_the_bucket_that_is_full_last() -> None:
    half = replace(_spec("half", 50), dtype=torch.float16)
    specs = [_spec("a", 100), _spec("b", 100), half, _spec("c", 100), _spec("d", 20)]

    def planned(least_bytes: int) -> list[tuple[int, ...]]:
        return [b.parameters for b in plan_buckets(specs, range(5), BucketPolicy(600, 600, least_bytes=least_bytes))]

    assert planned(0) == planned(480) == [(0, 1), (2,), (3, 4)]
    assert planned(481) == [(2,), (0, 1, 3, 4)]


def test_a_small_bucket_is_no_larger_than_the_others() -> None:
    assert default_policy("cpu", 0, small_bytes=10**9).first_bucket_bytes == 25 * MIB


def test_what_is_left_of_the_last_bucket_leaves_before_one_that_is_full_later() -> None:
    sizes = [30.0, 1.0, 1.0, 90.0, 0.5]  # the fourth is alone; the last is split off the bucket of the others
    specs = [_spec(f"p{i}", int(size * MIB) // 4) for i, size in enumerate(sizes)]
    policy = BucketPolicy(100 * MIB, 100 * MIB, last_bucket_bytes=MIB, alone_bytes=50 * MIB)
    buckets = plan_buckets(specs, range(5), policy)
    assert [bucket.parameters for bucket in buckets] == [(0, 1, 2), (3,), (4,)]
