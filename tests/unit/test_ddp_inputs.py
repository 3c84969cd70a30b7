"""Moving inputs: every nesting that torch moves, on the meta device, which needs no accelerator."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.utils import _to_kwargs
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from phalanx.api.ddp.inputs import to_device

META = torch.device("meta")
Point = namedtuple("Point", "x y")


@dataclass
class Custom:
    tensor: torch.Tensor


class Own(tuple):
    """A tuple that is no named tuple."""


def one() -> torch.Tensor:
    return torch.ones(2)


def places(value: object) -> object:
    """The structure with each tensor replaced by its device."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, tuple | list):
        return type(value).__name__, [places(part) for part in value]
    if isinstance(value, dict):
        return type(value).__name__, {key: places(part) for key, part in value.items()}
    return value


def test_a_tensor_moves() -> None:
    assert to_device(one(), META).device == META


@pytest.mark.parametrize(
    "make",
    [
        lambda: (one(), one()),
        lambda: [one(), [one()]],
        lambda: {"a": one(), "b": {"c": one()}},
        lambda: OrderedDict(b=one(), a=(one(), 3)),
        lambda: Point(one(), [one()]),
        lambda: (Point(x=1, y=one()), None, "text", 2.5),
        lambda: ([], {}, ()),
    ],
    ids=["tuple", "list", "dict", "ordered", "named", "mixed", "empty"],
)
def test_nested_tensors_move_as_torch_moves_them(make) -> None:
    moved = to_device(make(), META)
    (theirs,), _ = _to_kwargs((make(),), None, META, use_side_stream_for_tensor_copies=False)
    assert places(moved) == places(theirs[0])
    assert "cpu" not in str(places(moved))


def test_named_tuples_keep_their_type() -> None:
    moved = to_device(Point(one(), 1), META)
    assert type(moved) is Point and moved.x.device == META and moved.y == 1


def test_custom_types_pass_untouched() -> None:
    custom = Custom(one())
    assert to_device([custom], META)[0] is custom
    assert custom.tensor.device.type == "cpu"


def test_packed_sequences_move() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = to_device((packed,), META)[0]
    assert isinstance(moved, PackedSequence) and moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"  # as PyTorch wants them


def test_a_defaultdict_moves_and_stays_one() -> None:
    """torch's own `_to_kwargs` fails on it: its type does not take the items first."""
    given: defaultdict[str, object] = defaultdict(list, a=one())
    moved = to_device(given, META)
    assert type(moved) is defaultdict and moved["a"].device == META and moved["new"] == []


def test_a_tuple_of_a_users_own_type_moves() -> None:
    moved = to_device(Own((one(),)), META)
    assert isinstance(moved, tuple) and moved[0].device == META


def test_what_does_not_need_to_move_is_the_same_tensor() -> None:
    tensor = one()
    assert to_device([tensor], torch.device("cpu"))[0] is tensor
