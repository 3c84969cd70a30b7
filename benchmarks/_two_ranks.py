"""Running a benchmark script again as two ranks, which meet by a file and leave their result in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_as_two_ranks(
    script: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Give each rank `arguments`, ``--store``, ``--out`` and ``--rank``; returns what rank 0 wrote to its ``--out``."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out.json"
        common = [sys.executable, script, *arguments, "--store", f"{folder}/store", "--out", out]
        env = {**os.environ, **(environment or {}), "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*common, "--rank", str(rank)], env=env) for rank in range(2)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"a rank of {script} {' '.join(arguments)} ended with {codes}")
        return dict(json.loads(Path(out).read_text()))
