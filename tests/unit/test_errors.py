"""One family; each says where, as far as it knows."""

from __future__ import annotations

import copy
import pickle

import pytest

from phalanx import errors
from phalanx.errors import PhalanxError

FAMILY = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PhalanxError)]


def test_there_is_a_family() -> None:
    assert len(FAMILY) >= 8
    assert all(issubclass(kind, RuntimeError) for kind in FAMILY)


@pytest.mark.parametrize("kind", FAMILY)
def test_each_names_rank_step_bucket_and_parameter(kind: type[PhalanxError]) -> None:
    error = kind("it broke", rank=2, group="own", step=7, bucket=1, parameters=["a.weight"])
    assert str(error) == "it broke [rank 2, group own, step 7, bucket 1, parameter a.weight]"
    assert (error.message, error.rank, error.group) == ("it broke", 2, "own")
    assert (error.step, error.bucket, error.parameters) == (7, 1, ("a.weight",))


@pytest.mark.parametrize("kind", FAMILY)
def test_what_is_not_known_is_not_said(kind: type[PhalanxError]) -> None:
    assert str(kind("it broke")) == "it broke"


def test_many_parameters_are_shortened_in_the_text_alone() -> None:
    names = [f"p{i}" for i in range(9)]
    error = PhalanxError("it broke", parameters=names)
    assert str(error) == "it broke [parameters p0, p1, p2 …]"
    assert error.parameters == tuple(names)


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("way", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_copies_say_the_same(kind: type[PhalanxError], way: object) -> None:
    error = kind("it broke", rank=2, parameters=["w"])
    twin = way(error)  # type: ignore[operator]
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert vars(twin) == vars(error)


def test_who_is_lost_or_failed_is_kept() -> None:
    assert errors.PeerLostError("gone", lost_ranks=[1, 2]).lost_ranks == (1, 2)
    assert errors.PeerFailedError("failed", failed_ranks=[3]).failed_ranks == (3,)
    assert issubclass(errors.CollectiveTimeoutError, TimeoutError)
