"""What the reducer tells listeners, in which order, and that nobody pays who does not listen."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, check_steps, mlp, plain_loss

import phalanx as px
from phalanx import events
from phalanx.testing import ranks


@ranks(2)
def test_a_step_is_told_in_order() -> None:
    rank = dist.get_rank()
    with events.recorded() as building:
        model = px.replicate(mlp(), **SMALL)
    assert [type(e).__name__ for e in building] == ["BucketsPlanned"]
    assert building[0].reason == "construction"
    plain_loss(model, rank, 0).backward()
    plain_loss(model, rank, 1).backward()
    with events.recorded() as seen:
        plain_loss(model, rank, 2).backward()
    assert isinstance(seen[0], events.StepStarted)
    assert isinstance(seen[-1], events.StepFinalized)
    assert {event.step for event in seen} == {3}
    assert {event.module for event in seen} == {"Sequential"}
    assert [event.at_s for event in seen] == sorted(event.at_s for event in seen)
    ready = [event.parameter for event in seen if isinstance(event, events.GradientReady)]
    assert ready[0].startswith("4.")
    assert sorted(ready) == sorted(name for name, _ in model.named_parameters())
    launched = [event.bucket for event in seen if isinstance(event, events.BucketLaunched)]
    reduced = [event.bucket for event in seen if isinstance(event, events.BucketReduced)]
    assert launched == reduced == list(range(len(launched)))
    assert len(launched) >= 3
    for number in launched:  # filled, then launched, then reduced
        filled = max(i for i, e in enumerate(seen) if isinstance(e, events.GradientReady) and e.bucket == number)
        left = next(i for i, e in enumerate(seen) if isinstance(e, events.BucketLaunched) and e.bucket == number)
        back = next(i for i, e in enumerate(seen) if isinstance(e, events.BucketReduced) and e.bucket == number)
        assert filled < left < back


@ranks(2)
def test_reduction_overlaps_with_backward() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    for step in range(2):
        plain_loss(model, rank, step).backward()
    with events.recorded() as seen:
        plain_loss(model, rank, 2).backward()
    first_launch = next(i for i, e in enumerate(seen) if isinstance(e, events.BucketLaunched))
    last_gradient = max(i for i, e in enumerate(seen) if isinstance(e, events.GradientReady))
    assert first_launch < last_gradient


@ranks(2)
def test_what_nobody_used_is_named_in_the_last_event() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp(), **SMALL)
    with events.recorded() as seen:
        model[0](torch.randn(2, 6)).sum().backward()
    assert rank in (0, 1)
    assert sorted(seen[-1].unused) == ["2.bias", "2.weight", "4.bias", "4.weight"]


@ranks(2)
def test_listening_changes_nothing_and_may_begin_in_the_middle() -> None:
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    check_steps(model, reference, plain_loss, steps=2)
    with events.recorded() as seen:
        check_steps(model, reference, plain_loss, steps=2)
    assert seen
    check_steps(model, reference, plain_loss, steps=2)
    count = len(seen)
    plain_loss(model, dist.get_rank(), 0).backward()
    assert len(seen) == count  # it has stopped


@ranks(2)
def test_nothing_is_made_when_nobody_listens() -> None:
    made = []
    real = events.emit
    events.emit = lambda event: (made.append(event), real(event))  # type: ignore[assignment]
    try:
        model = px.replicate(mlp(), **SMALL)
        plain_loss(model, dist.get_rank(), 0).backward()
        plain_loss(model, dist.get_rank(), 1).backward()
        assert made == []
        with events.recorded():
            plain_loss(model, dist.get_rank(), 2).backward()
        assert made  # the test would notice
    finally:
        events.emit = real  # type: ignore[assignment]
