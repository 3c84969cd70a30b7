"""`px.swap_ddp` without ranks: what is replaced, what is put back, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.nn.parallel.distributed
from torch import nn

import phalanx as px
from phalanx.compose import swap as swapping
from phalanx.compose.swap import ours_for, swap_ddp

TORCH_DDP = torch.nn.parallel.DistributedDataParallel
HOLDERS = (torch.nn.parallel, torch.nn.parallel.distributed)
CONSTRUCTOR = TORCH_DDP.__init__


def in_place() -> bool:
    names = {holder.DistributedDataParallel for holder in HOLDERS}
    assert len(names) == 1, "one name was replaced and the other was not"
    return names == {px.DistributedDataParallel} and TORCH_DDP.__init__ is not CONSTRUCTOR


def is_torchs() -> bool:
    return {h.DistributedDataParallel for h in HOLDERS} == {TORCH_DDP} and TORCH_DDP.__init__ is CONSTRUCTOR


@pytest.fixture(autouse=True)
def _torchs_before_and_after() -> Iterator[None]:
    assert is_torchs()
    yield
    left, swapping._placed = dict(swapping._placed), {}
    for place in left.values():
        setattr(place.holder, place.name, place.before)
    assert not left, "a test left the swap in place"


def test_it_is_a_context_and_can_be_undone() -> None:
    with px.swap_ddp():
        assert in_place()
    assert is_torchs()
    swap = px.swap_ddp()
    assert in_place()
    swap.undo()
    swap.undo()
    assert is_torchs()


def test_an_exception_undoes_it_too() -> None:
    with pytest.raises(KeyError), px.swap_ddp():
        raise KeyError
    assert is_torchs()


def test_calling_again_changes_nothing_and_does_not_undo_the_first() -> None:
    with px.swap_ddp():
        with px.swap_ddp():
            assert in_place()
        assert in_place()
        px.swap_ddp().undo()
        assert in_place()
    assert is_torchs()


def test_signatures_are_torchs_while_it_lasts() -> None:
    before = inspect.signature(TORCH_DDP)
    with px.swap_ddp():
        assert inspect.signature(TORCH_DDP) == before
        assert list(inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters) == list(before.parameters)


def test_the_name_is_a_function_and_a_module() -> None:
    function = px.swap_ddp
    module = importlib.import_module("phalanx.swap_ddp")
    try:
        assert px.swap_ddp is module, "importing a submodule binds its name in the package"
        with px.swap_ddp():
            assert in_place()
        with pytest.raises(TypeError, match="no_such_option"):
            px.swap_ddp(no_such_option=True)
    finally:
        del sys.modules["phalanx.swap_ddp"]
        px.swap_ddp = function


@pytest.mark.parametrize(
    ("option", "name", "holders"),
    [
        ("sync_batchnorm", "SyncBatchNorm", (torch.nn, torch.nn.modules)),
        ("sampler", "DistributedSampler", (torch.utils.data, torch.utils.data.distributed)),
    ],
)
def test_other_classes_are_replaced_only_when_asked_for(option: str, name: str, holders: tuple, monkeypatch) -> None:
    theirs = getattr(holders[0], name)
    ours = getattr(px, name, None) or type(name, (theirs,), {})
    monkeypatch.setattr(px, name, ours, raising=False)
    with px.swap_ddp():
        assert all(getattr(holder, name) is theirs for holder in holders)
        with px.swap_ddp(**{option: True}):
            assert all(getattr(holder, name) is ours for holder in holders)
        assert all(getattr(holder, name) is theirs for holder in holders)
        assert in_place()


def test_a_class_that_phalanx_does_not_have_is_refused_and_nothing_is_changed(monkeypatch) -> None:
    monkeypatch.delattr(px, "DistributedSampler", raising=False)
    with pytest.raises(ValueError, match="no DistributedSampler"):
        px.swap_ddp(sampler=True)
    assert is_torchs()


def test_somebody_elses_replacement_is_refused(monkeypatch) -> None:
    class Other(nn.Module):
        pass

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Other)
    with pytest.raises(ValueError, match=r"is not torch's but .*Other"):
        px.swap_ddp()
    assert torch.nn.parallel.distributed.DistributedDataParallel is TORCH_DDP


def test_a_replacement_made_on_top_is_left_as_it_is(monkeypatch) -> None:
    with monkeypatch.context() as patch:
        with pytest.warns(RuntimeWarning, match="replaced again"), px.swap_ddp():
            patch.setattr(torch.nn.parallel, "DistributedDataParallel", dict)
        assert torch.nn.parallel.DistributedDataParallel is dict
    torch.nn.parallel.DistributedDataParallel = TORCH_DDP


def test_a_derived_class_gets_our_methods_below_its_own() -> None:
    class Derived(TORCH_DDP):
        def forward(self, *inputs: object) -> object:
            return super().forward(*inputs)

    made = ours_for(Derived)
    assert made is ours_for(Derived) is ours_for(made)
    assert made.__mro__[1:3] == (Derived, px.DistributedDataParallel)
    assert made.__qualname__ == Derived.__qualname__ and made.forward is Derived.forward
    assert ours_for(TORCH_DDP) is px.DistributedDataParallel is ours_for(px.DistributedDataParallel)


def test_a_class_that_ours_cannot_join_is_refused() -> None:
    class Final(TORCH_DDP):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    with pytest.raises(TypeError, match=r"Final is derived from torch's .*\(final\)"):
        ours_for(Final)


def test_the_function_is_the_one_of_the_module() -> None:
    assert px.swap_ddp is swap_ddp
