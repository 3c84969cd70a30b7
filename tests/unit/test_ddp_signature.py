"""Our class beside torch's: the same constructor, and a list of what is torch's own code still."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px

OURS = {
    name: member
    for cls in reversed(px.DistributedDataParallel.__mro__)
    if cls.__module__.startswith("phalanx")
    for name, member in vars(cls).items()
}
JOINING = "joining is torch's algorithm; it calls methods of ours for everything that touches the engine"
INHERITED = {
    "__doc__": "not code",
    "__module__": "not code",
    "__static_attributes__": "not code",
    "__firstlineno__": "not code",
    "__annotations__": "not code",
    "_active_ddp_module": "where torch.compile looks for the module under way: one place for both classes",
    "_get_active_ddp_module": "reads the above",
    "__abstractmethods__": "made by ABCMeta",
    "_abc_impl": "made by ABCMeta",
    "_get_data_parallel_params": "static: reads marks on parameters",
    "_set_params_and_buffers_to_ignore_for_model": "static: sets marks on a module that is not wrapped yet",
    "_get_parameters": "reads the module alone",
    "scatter": "kept by torch for old callers; reads the inputs alone",
    "to_kwargs": "kept by torch for old callers",
    "gather": "kept by torch for old callers",
    "train": "nn.Module's",
    "join": JOINING,
    "join_device": JOINING,
    "_inside_ddp_forward": "says whose forward runs; ours says so in _run_ddp_forward, without a generator",
    "join_process_group": JOINING,
    "_check_and_sync_module_buffers": JOINING,
    "_find_common_rank": JOINING,
}
NOT_THERE = {
    "_ddp_init_helper": "builds torch's C++ reducer; ours is built by _build_engine",
    "_register_accum_grad_hook": "torch.compile's Python reducer",
    "_fire_reducer_autograd_hook": "torch's mixed precision, which the constructor refuses",
    "_root_copy_hook": "torch's mixed precision",
    "_module_wait_for_copy_hook": "torch's mixed precision",
}


def test_constructor_is_torchs() -> None:
    ours = inspect.signature(px.DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(TorchDDP.__init__).parameters
    assert [(p.name, p.default, p.kind) for p in theirs.values()] == [
        (p.name, p.default, p.kind) for p in ours.values() if p.name in theirs
    ]
    newer = set(ours) - set(theirs)
    if torch.__version__.startswith("2.13"):
        assert not newer
    assert all(ours[name].default is not inspect.Parameter.empty for name in newer)


def test_what_is_torchs_own_code_is_listed() -> None:
    """Fails when torch adds a method that we have not looked at, and when we drop one of ours."""
    inherited = set(vars(TorchDDP)) - set(OURS)
    assert inherited - set(INHERITED) - set(NOT_THERE) == set()


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the list is that of torch 2.13")
def test_the_list_has_nothing_that_torch_lacks_or_we_define() -> None:
    inherited = set(vars(TorchDDP)) - set(OURS)
    dunders = {name for name in INHERITED if name.startswith("__") or name == "_abc_impl"}
    assert (set(INHERITED) | set(NOT_THERE)) - inherited - dunders == set()


def test_methods_take_torchs_arguments() -> None:
    for name, theirs in vars(TorchDDP).items():
        ours = OURS.get(name)
        if ours is None or not inspect.isfunction(theirs) or name == "__init__":
            continue
        wanted = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted, name


def test_it_is_a_torch_ddp_to_whoever_asks() -> None:
    assert issubclass(px.DistributedDataParallel, TorchDDP)
