"""The swap in processes that a swapped program starts: ranks that wrap their models in different classes would hang.

A fresh interpreter imports the first `sitecustomize` on its path. Ours, in `child_site`, waits until torch has been
imported, swaps, and hands on to the `sitecustomize` that would have been imported without it.
"""

from __future__ import annotations

import os
from pathlib import Path

SITE = str(Path(__file__).parent / "child_site")
VARIABLE = "PHALANX_SWAP_DDP"


def swap_in_children(**options: bool) -> None:
    """From now on, Python processes that this one starts swap as soon as they have imported torch."""
    os.environ[VARIABLE] = ",".join(name for name, wanted in sorted(options.items()) if wanted)
    before = os.environ.get("PYTHONPATH", "")
    if SITE not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = SITE + (os.pathsep + before if before else "")
