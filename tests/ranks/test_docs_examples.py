"""The examples of the docs, run as they stand.

A fenced block that opens with "```python ranks=2" is run by that many ranks, with no process group but the one it makes
(`px.init()`), in a folder of its own. The blocks of one page are separate programs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from phalanx.testing import run_ranks

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```python ranks=(\d+)\n(.*?)^```", re.M | re.S)


def _examples() -> list[tuple[str, int, str]]:
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        for number, (num_ranks, code) in enumerate(_BLOCK.findall(page.read_text()), 1):
            found.append((f"{page.stem}-{number}", int(num_ranks), code))
    return found


EXAMPLES = _examples()


def _run(name: str, code: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(code, f"docs/{name}", "exec"), {"__name__": "__main__"})


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "num_ranks", "code"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_it_runs(name: str, num_ranks: int, code: str, tmp_path: Path) -> None:
    keeps = "DTensor's caches keep meshes, and with them the store" if "torch.distributed.tensor" in code else ""
    run_ranks(_run, num_ranks, name, code, str(tmp_path), backend=None, timeout_s=60, allow_leaks=keeps)
