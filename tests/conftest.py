"""What all tests share: the warm server is started early, and a test in ranks gets the time that it asks for."""

from __future__ import annotations

# Optimizers, torch.testing and checkpointing import these on first use, which takes a second in every rank. What is
# imported here the warm server imports too, once.
import pytest
import torch._dynamo
import torch.distributed.tensor
import torch.utils.checkpoint  # noqa: F401

from phalanx.testing import shut_down, warm_up


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    default_s = float(config.getini("timeout") or 0)
    for item in items:
        options = getattr(getattr(item, "function", None), "phalanx_ranks", None)
        # The harness's own limit must come first: it shows where the ranks are, pytest's shows where pytest is.
        if options is not None and options.timeout_s + 30 > default_s and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(options.timeout_s + 30))


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any(_uses_ranks(item) for item in session.items):
        warm_up()  # imports torch while the first tests run


def pytest_unconfigure() -> None:
    shut_down()


def _uses_ranks(item: pytest.Item) -> bool:
    return hasattr(getattr(item, "function", None), "phalanx_ranks")
