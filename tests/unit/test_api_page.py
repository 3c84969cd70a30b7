"""docs/api.md names everything that is public, and every option of `replicate`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import phalanx as px

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def test_it_names_all_that_is_public() -> None:
    named = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", PAGE))
    assert set(px.__all__) <= named, sorted(set(px.__all__) - named)


def test_it_names_the_options_of_replicate() -> None:
    options = set(inspect.signature(px.replicate).parameters) - {"module"}
    assert options == set(re.findall(r"^\| `(\w+)` \| [^|]*\| [^|]* \|$", PAGE, re.M)) & options
