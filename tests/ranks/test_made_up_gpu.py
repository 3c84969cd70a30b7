"""What GPUs ask of the reducer beside streams, shown without one: threads of several devices, captures, memory."""

from __future__ import annotations

import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import (
    SMALL,
    assert_gradients,
    average_gradients,
    batch,
    check_steps,
    flush_engine,
    mlp,
    plain_loss,
)
from torch import nn

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.errors import ReducerStateError
from phalanx.reducer import arrivals
from phalanx.reducer.reducer import Reducer
from phalanx.testing import ranks

# -- several devices ---------------------------------------------------------------------------------------------------


class OnTwoDevices(nn.Module):
    """The second device has no memory: what matters here is that it is another."""

    def __init__(self) -> None:
        super().__init__()
        self.here = mlp()
        self.there = nn.Linear(4, 4, device="meta")


def test_parameters_on_several_devices_arrive_one_at_a_time() -> None:
    """Alone: no thread is needed to see how they are looked at."""
    for make, several in ((OnTwoDevices, True), (mlp, False)):
        reducer = Reducer(list(make().named_parameters()), _alone(), name="made")
        assert (reducer.arrivals._turns is not None) is several


def _alone() -> object:
    from tests.unit.reducer.test_roll_call import Alone

    alone = Alone()
    alone.next_serial = lambda: 1  # type: ignore[attr-defined]
    alone.averages = False  # type: ignore[attr-defined]
    alone.topics, alone.undertakings, alone.name = set(), [], "alone"  # type: ignore[attr-defined]
    return alone


def _by_two_threads(reducer: Reducer) -> None:
    """As the engine does where parameters lie on two devices, with a begin that lets the other thread run."""
    begin = reducer.begin_backward

    def slowly() -> None:
        began.set()
        time.sleep(0.05)  # not for the other: it is there. Without this a thread would not be interrupted here
        begin()

    def bring(slots: list[arrivals.ParameterSlot], *, second: bool) -> None:
        if second:
            assert began.wait(10)
        with torch.no_grad():
            for slot in slots:
                reducer.arrivals.arrive(slot)

    began = threading.Event()
    reducer.begin_backward = slowly  # type: ignore[method-assign]
    reducer._passes.enter = lambda: None  # type: ignore[method-assign]
    half = len(reducer.slots) // 2
    threads = [
        threading.Thread(target=bring, args=(slots,), kwargs={"second": second})
        for slots, second in ((reducer.slots[half:], False), (reducer.slots[:half], True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@ranks(2)
def test_gradients_of_two_threads_are_all_averaged() -> None:
    rank = dist.get_rank()
    arrivals.on_several_devices = lambda slots: True
    model = px.replicate(mlp(), **SMALL)
    reducer = replica_of(model).reducer
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        _by_two_threads(reducer)
        reducer._end_of_backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and (parameter.grad == 1.5).all(), name


# -- captures ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_an_optimizer_may_step_on_what_a_replay_has_averaged() -> None:
    """The replay of a captured pass tells the reducer nothing; its gradients lie where the capture has put them."""
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    check_steps(model, reference, plain_loss, steps=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step()
    reducer = replica_of(model).reducer
    steps = reducer.stats.steps
    reducer.layout.control.note_capture()
    for _ in range(2):
        optimizer.step()
        assert reducer.stats.steps == steps
    optimizer.zero_grad()
    optimizer.step()  # no replay leaves none: this rank takes part with zeros, as ever
    assert reducer.stats.steps == steps + 1


@ranks(2)
def test_another_order_in_a_capture_is_an_error() -> None:
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    rank = dist.get_rank()
    check_steps(model, reference, plain_loss, steps=6)
    assert replica_of(model).reducer.arrivals.roll is not None
    arrivals.is_capturing = lambda device: True
    model.zero_grad()
    with pytest.raises(ReducerStateError, match=r"captured in a CUDA graph.*Run some steps exactly as they are"):
        model[:3](batch(rank, 6)).sum().backward()
    arrivals.is_capturing = lambda device: False
    flush_engine()
    model.zero_grad()
    plain_loss(model, rank, 7).backward()
    assert_gradients(model, average_gradients(reference, plain_loss, 7))


# -- memory ------------------------------------------------------------------------------------------------------------


@ranks(2)
def test_old_buckets_are_gone_when_new_ones_are_made() -> None:
    model = px.replicate(mlp(), **SMALL)
    reducer = replica_of(model).reducer
    for step in range(6):
        if step in (1, 5):  # the order of arrival is applied; and one is frozen when there are runs
            _watch_memory(reducer)
        if step == 5:
            assert reducer.arrivals.roll is not None
            model[2].requires_grad_(False)
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
    assert reducer.stats.num_plans == 3


def _watch_memory(reducer: Reducer) -> None:
    buffers = [weakref.ref(bucket.buffer) for bucket in reducer.buckets]
    allocate, asked = reducer.group.allocate, []

    def allocate_when_gone(*arguments: object) -> torch.Tensor:
        give_up = time.monotonic() + 5  # Gloo's own thread may hold the last work for a moment
        while not asked and any(buffer() is not None for buffer in buffers):
            assert time.monotonic() < give_up, "something keeps the old buckets' memory"
            time.sleep(0.001)
        asked.append(arguments)
        return allocate(*arguments)  # type: ignore[arg-type]

    reducer.group.allocate = allocate_when_gone  # type: ignore[method-assign]
