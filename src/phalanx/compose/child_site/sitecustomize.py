"""Imported by every interpreter that a program under `python -m phalanx.swap_ddp` starts: see `child_processes`.

It must be cheap and must not import torch: most such processes (a compiler, a downloader) never do.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class AfterTorch:
    """A finder that finds nothing, except once: it sees to it that the swap follows the import of torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_swap(module: ModuleType) -> None:
            load(module)
            _swap()

        spec.loader.exec_module = load_and_swap  # type: ignore[method-assign]  # of this one loader, made for torch
        return spec


def _swap() -> None:
    from phalanx.compose.swap import swap_ddp

    names = os.environ.get("PHALANX_SWAP_DDP", "").split(",")
    swap_ddp(**{name: True for name in names if name})


def _hand_on(path: Sequence[str]) -> None:
    """Run the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        hidden = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = hidden
        spec.loader.exec_module(hidden)


if "PHALANX_SWAP_DDP" in os.environ:
    sys.meta_path.insert(0, AfterTorch())
_hand_on(sys.path)
