"""All tests of this folder, several files at a time, with torch alone: what a machine that is lent for minutes wants.

    PYTHONPATH=src python tests/gpu/run_all.py [--beside 3] [test_streams …]

Each file is a program of its own, with ranks of its own. Of one that fails, the end of what it printed is shown.
`GPU_TESTS_DEVICE=cpu` runs them where there is no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 400
SHOWN_LINES = 60


def run(file: Path) -> bool:
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)  # its ranks, too
        output, _ = process.communicate()
        output += f"\nstill running after {LIMIT_S} s"
    passed = process.returncode == 0
    checks = output.count("  ok ")
    report = f"{'passed' if passed else 'FAILED'} {file.stem}, {checks} checks ({time.monotonic() - began:.0f} s)"
    if not passed:
        report += "\n" + "\n".join(output.splitlines()[-SHOWN_LINES:])
    print(report, flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="by name, without .py; all by default")
    parser.add_argument("--beside", type=int, default=3, help="how many run at a time")
    arguments = parser.parse_args()
    known = {file.stem: file for file in sorted(HERE.glob("test_*.py"))}
    if unknown := set(arguments.files) - set(known):
        parser.error(f"no such file: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = [known[name] for name in arguments.files or known]
    with ThreadPoolExecutor(arguments.beside) as pool:
        results = list(pool.map(run, chosen))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
