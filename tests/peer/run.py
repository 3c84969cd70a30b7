"""`make peer`: torch's own distributed tests, on our class and on our process group, against what torch itself scores.

    python tests/peer/run.py                          all suites, but the one that needs a GPU
    python tests/peer/run.py ddp2 …                   some of them
    python tests/peer/run.py ddp2 --test T …          some tests of one
    python tests/peer/run.py ddp_gpu2 --beside 10     on a GPU; wants torch, and `expecttest` on the path

A suite fails when a test that passes with torch's own class (or on Gloo) does not pass with ours, unless `DIFFERENT` says
why; and when a test named there passes after all, so that the list stays true.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PER_TEST_S = 120.0


@dataclass(frozen=True)
class Suite:
    """A list of tests, the environment they run in, and what torch's own implementation scores."""

    tests: str
    base: str
    environment: dict[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ("",)
    without: tuple[str, ...] = ()
    driver: str = "torch_tests.py"
    needs_gpu: bool = False

    def names(self) -> list[str]:
        listed = (HERE / self.tests).read_text().split()
        wanted = [name for name in listed if any(part in name.lower() for part in self.only)]
        return [name for name in wanted if not any(part in name for part in self.without)]

    def must_pass(self) -> set[str]:
        if not self.base:
            return set(self.names())
        scores: dict[str, str] = json.loads((HERE / "base" / self.base).read_text())
        return {name for name, score in scores.items() if score == "passed"}


def _ddp(world_size: int) -> Suite:
    environment = {"SWAP": "phalanx", "WORLD_SIZE": str(world_size)}
    return Suite("ddp_tests.txt", f"ddp_world{world_size}.json", environment)


def _ddp_on_gpu() -> Suite:
    """Two ranks on one GPU, over Gloo; what torch's own class scores there was taken on an H200, with torch 2.11."""
    environment = {"SWAP": "phalanx", "WORLD_SIZE": "2", "DEVICE": "cuda:0"}
    return Suite("ddp_tests.txt", "ddp_gpu_world2.json", environment, needs_gpu=True)


def _collectives(world_size: int) -> Suite:
    environment = {"GROUP": "phalanx", "WORLD_SIZE": str(world_size)}
    return Suite("collective_tests.txt", f"collectives_world{world_size}.json", environment)


def _all_to_all(world_size: int) -> Suite:
    """torch runs these on MPI alone, which its wheel does not have: none is skipped here, and all must pass."""
    environment = {"GROUP": "phalanx", "BACKEND": "mpi", "WORLD_SIZE": str(world_size)}
    # Those on CUDA skip themselves; those of a sub-group ask for a rank that a world of two does not have.
    without = ("cuda", "split_group", "all_group") if world_size == 2 else ("cuda",)
    return Suite("collective_tests.txt", "", environment, only=("all_to_all",), without=without)


def _rpc() -> Suite:
    """All must pass, as they do with torch's own class."""
    return Suite("rpc_tests.txt", "", {"SWAP": "phalanx"}, driver="torch_rpc_tests.py")


def _sampling(world_size: int) -> Suite:
    """The averager and sampler tests, which are listed with the collectives, with our classes in torch's place."""
    environment = {"SWAP": "phalanx", "WORLD_SIZE": str(world_size)}
    base = f"collectives_world{world_size}.json"
    return Suite("collective_tests.txt", base, environment, only=("averag", "sampl"))


SUITES = {
    "ddp2": _ddp(2),
    "ddp3": _ddp(3),
    "collectives2": _collectives(2),
    "collectives3": _collectives(3),
    "collectives4": _collectives(4),
    "all_to_all2": _all_to_all(2),
    "all_to_all3": _all_to_all(3),
    "all_to_all4": _all_to_all(4),
    "sampling2": _sampling(2),
    "sampling3": _sampling(3),
    "sampling4": _sampling(4),
    "rpc": _rpc(),
    "ddp_gpu2": _ddp_on_gpu(),
}

# Tests that pass with torch's own and not with ours, each with the reason (docs/parity.md says more). `run` takes the
# names that a suite has; all are of the collectives.
DIFFERENT = {
    "test_get_backend": "asks that the backend's name be gloo",
    "test_monitored_barrier_gloo": "torch's monitored_barrier refuses any backend not named gloo: ours is px's own",
    "test_monitored_barrier_gloo_subgroup": "likewise",
}


def outcomes(names: list[str], environment: dict[str, str], driver: str) -> Iterator[dict[str, Any]]:
    """One process runs test after test with forked ranks; after a hang or a crash a new one goes on behind it."""
    left = list(names)
    while left:
        child = subprocess.Popen(
            [sys.executable, str(HERE / driver), "--lines", *left],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_forward_lines, args=(child.stdout, said), daemon=True).start()
        current = left[0]
        ended = {"outcome": "crashed", "why": "its process ended"}
        try:
            while line := said.get(timeout=PER_TEST_S):
                record = _parsed(line)
                current = record.get("began", current)
                if "test" in record:
                    left.remove(record["test"])
                    yield record
        except queue.Empty:
            ended = {"outcome": "timeout", "why": f"nothing was heard of it for {PER_TEST_S:g} s"}
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()
        if current in left:  # else it ended between two tests
            left.remove(current)
            yield {"test": current, "seconds": 0.0, **ended}


def side_by_side(names: list[str], suite: Suite, number: int) -> Iterator[dict[str, Any]]:
    """As `outcomes`, by so many processes at a time."""
    records: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def work(part: list[str]) -> None:
        try:
            for record in outcomes(part, suite.environment, suite.driver):
                records.put(record)
        finally:
            records.put(None)

    for place in range(number):
        threading.Thread(target=work, args=(names[place::number],), daemon=True).start()
    at_work = number
    while at_work:
        record = records.get()
        if record is None:
            at_work -= 1
        else:
            yield record


def _forward_lines(stream: Any, said: queue.SimpleQueue[str]) -> None:
    for line in stream:
        said.put(line)
    said.put("")


def _parsed(line: str) -> dict[str, Any]:
    """A test may print, too: only lines that are JSON objects are ours."""
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def run(title: str, suite: Suite, chosen: list[str], beside: int) -> list[str]:
    """Run a suite, print what did not pass, and return the names that break the promise."""
    began = time.monotonic()
    names = chosen or suite.names()
    must = suite.must_pass()
    count: Counter[str] = Counter()
    broken = []
    for record in side_by_side(names, suite, beside):
        name, outcome = record["test"], record["outcome"]
        count[outcome] += 1
        passed = outcome == "passed"
        if name in must and not passed and name not in DIFFERENT:
            broken.append(name)
        elif name in DIFFERENT and passed:
            broken.append(f"{name} (passes now: take it off the list)")
        if not passed or chosen:
            mark = "LOST" if name in broken else "    "
            print(f"{mark} {outcome:8} {record['seconds']:6.1f} s  {name}  {record['why']}", flush=True)
    score = ", ".join(f"{number} {kind}" for kind, number in sorted(count.items()))
    of = len(must & set(names))
    print(
        f"{title}: {score}; of {of} that pass with torch's own, {of - len(broken)} pass or differ on purpose "
        f"({time.monotonic() - began:.0f} s)",
        flush=True,
    )
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; by default all that need no GPU")
    parser.add_argument("--test", action="append", default=[], help="only this test; may be given several times")
    parser.add_argument("--beside", type=int, default=1, help="how many tests run side by side")
    arguments = parser.parse_args()
    unknown = [title for title in arguments.suites if title not in SUITES]
    if unknown:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    titles = arguments.suites or [title for title, suite in SUITES.items() if not suite.needs_gpu]
    broken = {title: run(title, SUITES[title], arguments.test, arguments.beside) for title in titles}
    for title, names in broken.items():
        for name in names:
            print(f"{title}: lost {name}")
    return 1 if any(broken.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
