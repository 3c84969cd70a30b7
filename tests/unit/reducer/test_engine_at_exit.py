"""At exit the engine's thread may still hold the callback of the last pass: letting go of it later aborts the process."""

from __future__ import annotations

import threading
import time

import pytest

from phalanx.reducer import grad_hooks


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the engine holds: the callbacks that were queued."""
    kept: list[object] = []

    class Engine:
        def queue_callback(self, callback: object) -> None:
            kept.append(callback)

    monkeypatch.setattr(grad_hooks.Variable, "_execution_engine", Engine())
    return kept


def queue_one() -> None:
    passes = grad_hooks.BackwardPasses(on_end=lambda: None, on_broken=lambda: None)
    grad_hooks._queue(grad_hooks._End(passes, 7))


def test_waits_until_the_engine_has_let_go(held: list[object]) -> None:
    queue_one()
    thread = threading.Timer(0.05, held.clear)
    thread.start()
    grad_hooks._await_engine()
    assert not held
    thread.join()


def test_not_for_long(held: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_hooks, "ENDS_WITHIN_S", 0.02)
    queue_one()
    began = time.monotonic()
    grad_hooks._await_engine()
    assert held and 0.02 <= time.monotonic() - began < 5
    held.clear()
    grad_hooks._await_engine()
