"""That ranks hold the same model: the first difference, by name and with both sides."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.errors import MismatchError, PeerFailedError
from phalanx.reducer.verify import TensorEntry, first_difference, verify_same

entries = st.builds(
    TensorEntry,
    name=st.sampled_from(["a.weight", "a.bias", "b"]),
    role=st.sampled_from(["parameter", "buffer"]),
    shape=st.tuples(st.integers(0, 3)),
    stride=st.just((1,)),
    dtype=st.sampled_from(["torch.float32", "torch.float64"]),
    trained=st.booleans(),
)


@given(st.lists(entries, max_size=5), st.lists(entries, max_size=5))
def test_a_difference_is_found_where_there_is_one(mine: list[TensorEntry], theirs: list[TensorEntry]) -> None:
    assert (first_difference(mine, theirs) is None) == (mine == theirs)


@given(st.lists(entries, min_size=1, max_size=5), st.data())
def test_the_first_difference_is_named(mine: list[TensorEntry], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(mine) - 1))
    theirs = [*mine[:place], replace(mine[place], name="odd"), *mine[place + 1 :]]
    text = first_difference(mine, theirs)
    assert text is not None
    assert f"number {place}: here {mine[place].name}" in text
    assert "there odd" in text


class FakeGroup:
    """Rank `rank` of a group in which the others have said what they will say."""

    name = "fake"
    timeout_s = 60.0

    def __init__(self, rank: int, models: list[list[TensorEntry]], problems: dict[int, str] | None = None) -> None:
        self.rank = rank
        self.size = len(models)
        self._models = models
        self._problems = problems or {}
        self.said: list[str] = []

    def exchange(self, label: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.said.append(label)
        if label != "model":
            listed = [{"options": {}, "entries": [vars(entry) for entry in model]} for model in self._models]
            return [json.dumps(one).encode() for one in listed]
        parts = []
        for rank, model in enumerate(self._models):
            listener = _Listener(rank, len(self._models))
            _Said.catch(listener, model, self._problems.get(rank))
            parts.append(listener.payload)
        return parts


class _Listener:
    """Catches what a rank would say first."""

    name = "listener"
    timeout_s = 60.0

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.payload = rank, size, b""

    def exchange(self, label: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.payload = payload
        raise _Said


class _Said(Exception):
    @classmethod
    def catch(cls, listener: Any, model: list[TensorEntry], problem: str | None) -> None:
        with pytest.raises(cls):
            verify_same(listener, model, problem=problem)


def model(width: int = 3) -> list[TensorEntry]:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, width))
    return [TensorEntry.of(name, p, "parameter") for name, p in net.named_parameters()]


def test_equal_models_say_one_word_each() -> None:
    group = FakeGroup(0, [model(), model(), model()])
    verify_same(group, model())  # type: ignore[arg-type]
    assert group.said == ["model"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_names_the_same_pair_and_both_sides(rank: int) -> None:
    models = [model(), model(), model(5)]
    with pytest.raises(MismatchError, match=r"1\.weight") as caught:
        verify_same(FakeGroup(rank, models), models[rank])  # type: ignore[arg-type]
    text = str(caught.value)
    assert "[3, 3]" in text
    assert "[5, 3]" in text
    assert f"rank {rank} (here)" in text


def test_anothers_problem_is_an_error_that_names_it() -> None:
    group = FakeGroup(0, [model(), model()], {1: "it is on the meta device"})
    with pytest.raises(PeerFailedError, match=r"rank 1 .*it is on the meta device") as caught:
        verify_same(group, model())  # type: ignore[arg-type]
    assert caught.value.failed_ranks == (1,)


def test_ones_own_problem_is_for_the_caller_to_raise() -> None:
    group = FakeGroup(1, [model(), model()], {1: "it is on the meta device"})
    verify_same(group, model(), problem="it is on the meta device")  # type: ignore[arg-type]


def test_an_entry_shows_what_ranks_must_agree_on() -> None:
    frozen = nn.Parameter(torch.empty(2, 3), requires_grad=False)
    shown = TensorEntry.of("w", frozen, "parameter").shown()
    assert shown == "w (parameter of shape [2, 3], torch.float32, strides [3, 1], frozen)"
