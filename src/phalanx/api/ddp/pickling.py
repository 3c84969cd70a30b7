"""Instances of classes that were made on the fly, which cannot be found again by their name."""

from __future__ import annotations

import sys
from typing import Any


def new(cls: type) -> Any:
    """An instance without its state; what an unpickler calls."""
    return cls.__new__(cls)  # type: ignore[call-overload]


def nearest_importable(cls: type) -> type:
    """The class itself or its first ancestor that a module holds under its name."""
    for candidate in cls.__mro__:
        found: Any = sys.modules.get(candidate.__module__)
        for part in candidate.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is candidate:
            return candidate
    return cls
