"""`make test`: the tests in two halves side by side, since most of a test in ranks is waiting.

    python tests/shards.py [pytest's options]

The first half's output is shown as it comes, the second's when it is over. Exits with a failure if either failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RANKS = sorted(TESTS.glob("ranks/test_*.py"))
HALVES = (
    [TESTS / "unit", TESTS / "faults", TESTS / "parity", TESTS / "ranks" / "shm"]
    + [file for file in RANKS if file.name.startswith("test_ddp_")],
    [file for file in RANKS if not file.name.startswith("test_ddp_")],
)


def main(options: list[str]) -> int:
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "-m", "not gpu", *options]
        second = subprocess.Popen([*command, *map(str, HALVES[1])], stdout=output, stderr=subprocess.STDOUT)
        try:
            first = subprocess.call([*command, *map(str, HALVES[0])])
            second.wait()
        finally:
            second.terminate()
        output.seek(0)
        print(output.read())
    print(f"both halves took {time.monotonic() - began:.0f} s")
    return first or second.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
