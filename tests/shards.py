"""`make test`: the tests in two halves side by side, since most of a test in ranks is waiting.

    python tests/shards.py [pytest's options]

What leaves something behind on purpose for all to see comes first, alone. The first half's output is shown as it comes,
the second's when it is over. Then those that are for a GPU, on the CPU: to find mistakes in them where there is none. Exits
with a failure if any of them failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RANKS = sorted(TESTS.glob("ranks/test_*.py"))
MOVED = ("test_ddp_hooks.py", "test_ddp_parity.py")  # so that both take about the same time
IN_FIRST = [
    file for file in RANKS if file.name.startswith(("test_ddp_", "test_compile_autograd")) and file.name not in MOVED
]
HALVES = (
    [TESTS / "unit", TESTS / "faults", TESTS / "parity", TESTS / "ranks" / "shm", *IN_FIRST],
    [file for file in RANKS if file not in IN_FIRST],
)
# Shared memory has no owner in the file system: what this test leaves there would be found in the other half too.
ALONE = ["tests/ranks/test_harness.py::test_leaked_shared_memory"]


def main(options: list[str]) -> int:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", f"--rootdir={TESTS.parent}", *options]
    alone = subprocess.call([*command, *(str(TESTS.parent / test) for test in ALONE)])
    command += [f"--deselect={test}" for test in ALONE]
    with tempfile.TemporaryFile("w+") as output:
        second = subprocess.Popen([*command, *map(str, HALVES[1])], stdout=output, stderr=subprocess.STDOUT)
        try:
            first = subprocess.call([*command, *map(str, HALVES[0])])
            second.wait()
        finally:
            second.terminate()
        output.seek(0)
        print(output.read())
    print(f"both halves took {time.monotonic() - began:.0f} s", flush=True)
    third = 0
    if not options:
        on_cpu = {**os.environ, "GPU_TESTS_DEVICE": "cpu"}
        third = subprocess.call([sys.executable, str(TESTS / "gpu" / "run_all.py"), "--beside", "2"], env=on_cpu)
        print(f"with those for a GPU, on the CPU, {time.monotonic() - began:.0f} s")
    return alone or first or second.returncode or third


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
