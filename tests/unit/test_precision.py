"""The policy object: checked where it is made, and against the module that it is for."""

from __future__ import annotations

import dataclasses
from collections import defaultdict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import phalanx as px
from phalanx.api.ddp.mixed_precision import precision_of
from phalanx.api.nested import to_dtype


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"])
def test_dtypes_are_checked(field: str) -> None:
    px.Precision(**{field: torch.bfloat16})
    with pytest.raises(TypeError, match=f"{field} must be a torch.dtype such as torch.bfloat16, or None; got 'bf16'"):
        px.Precision(**{field: "bf16"})
    for wrong in (torch.int32, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"{field} must be one of torch.float16, .*got {wrong}"):
            px.Precision(**{field: wrong})


def test_what_is_kept_full_is_checked() -> None:
    kept = px.Precision(param_dtype=torch.bfloat16, keep_full=[nn.LayerNorm, "head"])
    assert kept.keep_full == (nn.LayerNorm, "head")
    assert px.Precision(param_dtype=torch.bfloat16, keep_full="head").keep_full == ("head",)
    for wrong in (3, nn.LayerNorm(2), int):
        with pytest.raises(TypeError, match="keep_full takes module types"):
            px.Precision(param_dtype=torch.bfloat16, keep_full=(wrong,))
    with pytest.raises(ValueError, match="give one of them too"):
        px.Precision(reduce_dtype=torch.bfloat16, keep_full=(nn.LayerNorm,))
    with pytest.raises(TypeError, match="cast_inputs must be True or False"):
        px.Precision(param_dtype=torch.bfloat16, cast_inputs="yes")


def test_it_is_frozen_equal_and_keyword_only() -> None:
    policy = px.Precision(param_dtype=torch.bfloat16)
    assert policy == px.Precision(param_dtype=torch.bfloat16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = None
    with pytest.raises(TypeError):
        px.Precision(torch.bfloat16)


def test_names_that_the_module_does_not_have_are_named() -> None:
    policy = px.Precision(param_dtype=torch.bfloat16, keep_full=("1", "0.bias", "2.weight"))
    assert "does not have: 2.weight" in str(policy.problem_with(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))


def test_a_scripted_submodule_is_refused_unless_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    problem = px.Precision(param_dtype=torch.bfloat16).problem_with(model)
    assert isinstance(problem, ValueError) and "1 is compiled by torch.jit" in str(problem)
    assert px.Precision(param_dtype=torch.bfloat16, keep_full="1").problem_with(model) is None


def test_torchs_configuration() -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    half = _MixedPrecision(param_dtype=torch.float16)
    assert precision_of(half) == px.Precision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    assert precision_of(None) is None
    with pytest.raises(TypeError, match=r"mixed_precision takes .*_MixedPrecision or phalanx.Precision, got dict"):
        precision_of({"param_dtype": torch.float16})
    with pytest.raises(ValueError, match="buffer_dtype must be one of"):
        precision_of(_MixedPrecision(buffer_dtype=torch.int8))


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    note: str = ""


Point = namedtuple("Point", "x y")


def test_tensors_in_any_nesting_are_cast_and_containers_keep_their_type() -> None:
    single, whole = torch.ones(2), torch.ones(2, dtype=torch.int64)
    table = defaultdict(list, {"a": [single], "b": whole})
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    given = (Point(single, whole), [single, "text"], table, Output(single, "kept"), packed, None)
    point, both, mapped, output, sequence, nothing = to_dtype(given, torch.bfloat16)
    assert type(point) is Point and point.x.dtype is torch.bfloat16 and point.y is whole
    assert both[0].dtype is torch.bfloat16 and both[1] == "text"
    assert type(mapped) is defaultdict and mapped["a"][0].dtype is torch.bfloat16 and mapped["b"] is whole
    assert output.logits.dtype is torch.bfloat16 and output.note == "kept"
    assert sequence.data.dtype is torch.bfloat16 and torch.equal(sequence.batch_sizes, packed.batch_sizes)
    assert nothing is None
    assert single.dtype is torch.float32 and table["a"][0] is single  # what was given is as it was
    unchanged = ([whole], {"a": whole}, Point(whole, 1))
    assert to_dtype(unchanged, torch.bfloat16) is unchanged
