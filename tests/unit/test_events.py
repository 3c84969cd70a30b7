"""Records for whoever listens, and no work when nobody does."""

from __future__ import annotations

import dataclasses
import time

import pytest

from phalanx import events


def test_listeners_hear_in_order_until_they_stop() -> None:
    first: list[events.Event] = []
    second: list[events.Event] = []
    stop_first, stop_second = events.listen(first.append), events.listen(second.append)
    one, two = events.StepStarted("net", 1), events.GradientReady("net", 1, "w", 0)
    events.emit(one)
    stop_first()
    events.emit(two)
    stop_second()
    events.emit(one)
    assert first == [one]
    assert second == [one, two]
    assert events.listeners == ()


def test_stopping_twice_or_while_hearing_is_harmless() -> None:
    heard = []

    def once(event: events.Event) -> None:
        heard.append(event)
        stop()
        stop()

    stop = events.listen(once)
    events.emit(events.StepStarted("net", 1))
    events.emit(events.StepStarted("net", 2))
    assert len(heard) == 1


def test_recorded_ends_with_its_block_also_by_an_exception() -> None:
    with pytest.raises(ArithmeticError), events.recorded() as seen:  # noqa: PT012
        events.emit(events.StepStarted("net", 1))
        raise ArithmeticError
    events.emit(events.StepStarted("net", 2))
    assert [event.step for event in seen] == [1]
    assert events.listeners == ()


def test_records_are_frozen_and_know_their_time() -> None:
    before = time.perf_counter()
    event = events.StepFinalized("net", 3, 0.5, ("w",))
    assert before <= event.at_s <= time.perf_counter()
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.step = 4  # type: ignore[misc]
    assert not hasattr(event, "__dict__")


def test_asking_whether_anyone_listens_costs_nanoseconds() -> None:
    """What the hot path pays: the idiom, against doing nothing at all."""
    rounds = range(100_000)

    def asking() -> float:
        start = time.perf_counter()
        for _ in rounds:
            if events.listeners:
                events.emit(events.StepStarted("net", 1))
        return time.perf_counter() - start

    def making() -> float:
        start = time.perf_counter()
        for _ in rounds:
            events.emit(events.StepStarted("net", 1))
        return time.perf_counter() - start

    asked, made = min(asking() for _ in range(5)), min(making() for _ in range(3))
    assert asked < made / 5  # a record that nobody hears would cost far more than asking
    assert asked / len(rounds) < 1e-6
