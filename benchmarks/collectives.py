"""Collectives side by side in one run: ours (arena and ordinary tensors), Gloo, and MPICH.

    python benchmarks/collectives.py --json out.json [--quick] [--world-sizes 2,4]

Every library gets fresh processes with one thread each, and takes its turn several times, so that a busy moment of the
machine does not fall on one of them alone. A number is the median over calls, taken on rank 0; the spread is the lowest
and highest of the turns' medians. MPICH needs `pip install mpi4py mpich`; without it its column is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIZES = [4, 1 << 10, 64 << 10, 1 << 20, 4 << 20, 25 << 20, 100 << 20]
QUICK_SIZES = [4, 64 << 10, 1 << 20, 25 << 20]
OPS = ["all_reduce", "broadcast", "all_gather", "reduce_scatter"]
LIBRARIES = ["arena", "plain", "gloo", "mpich"]
CALLS = [
    (64 << 10, 1000),
    (1 << 20, 200),
    (4 << 20, 60),
    (1 << 40, 16),
]  # up to so many bytes: calls, on every rank alike
TARGETS = [  # world size, bytes, ours, theirs, at least so many times as fast; all of all_reduce
    (2, 25 << 20, "arena", "gloo", 6.0),
    (2, 25 << 20, "arena", "mpich", 1.5),
    (2, 25 << 20, "plain", "gloo", 4.0),
    (2, 4, "plain", "gloo", 3.0),
    (4, 25 << 20, "arena", "gloo", 4.0),
]


# ---- one turn, in the ranks ----


def median_us(call: Callable[[], object], barrier: Callable[[], object], nbytes: int, quick: bool) -> float:
    """The median over calls; each call's own collective keeps the ranks in step."""
    calls = next(n for limit, n in CALLS if nbytes <= limit)
    calls = max(8, calls // 2) if quick else calls
    barrier()
    for _ in range(max(2, calls // 10)):
        call()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def torch_turn(library: str, rank: int, size: int, store: str, sizes: list[int], quick: bool) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from phalanx.comm import shm

    shm.register()
    backend = "gloo" if library == "gloo" else "phalanx"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    group: Any = dist.group.WORLD

    def make(numel: int) -> torch.Tensor:
        made = group.allocate(numel, torch.float32) if library == "arena" else torch.empty(numel)
        return made.fill_(1.0)

    results = {}
    for nbytes in sizes:
        numel = max(1, nbytes // 4)
        part = max(1, numel // size)
        for op in OPS:
            whole = make(part * size if op in ("all_gather", "reduce_scatter") else numel)
            piece = make(part)
            calls = {
                "all_reduce": lambda whole=whole: dist.all_reduce(whole),
                "broadcast": lambda whole=whole: dist.broadcast(whole, 0),
                "all_gather": lambda whole=whole, piece=piece: (
                    group._allgather_base(whole, piece).wait()
                    if not hasattr(dist, "all_gather_single")
                    else dist.all_gather_single(whole, piece)
                ),
                "reduce_scatter": lambda whole=whole, piece=piece: (
                    group._reduce_scatter_base(piece, whole).wait()
                    if not hasattr(dist, "reduce_scatter_single")
                    else dist.reduce_scatter_single(piece, whole)
                ),
            }
            try:
                results[f"{op} {nbytes}"] = median_us(calls[op], dist.barrier, nbytes, quick)
            except RuntimeError as error:  # Gloo has not every one of them
                results[f"{op} {nbytes}"] = float("nan")
                print(f"{library}: {op}: {error}", file=sys.stderr)
            if library == "arena":
                group.release(whole)
                group.release(piece)
    dist.barrier()
    dist.destroy_process_group()
    return results


def mpi_turn(sizes: list[int], quick: bool) -> dict[str, float]:
    import torch
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    size = comm.Get_size()
    results = {}
    for nbytes in sizes:
        numel = max(1, nbytes // 4)
        part = max(1, numel // size)
        whole, piece = torch.ones(max(numel, part * size)), torch.ones(part)
        w, p = memoryview(whole.numpy()), memoryview(piece.numpy())
        calls = {
            "all_reduce": lambda w=w: comm.Allreduce(MPI.IN_PLACE, [w, MPI.FLOAT], op=MPI.SUM),
            "broadcast": lambda w=w: comm.Bcast([w, MPI.FLOAT], root=0),
            "all_gather": lambda w=w, p=p, n=part: comm.Allgather([p, MPI.FLOAT], [w, n, MPI.FLOAT]),
            "reduce_scatter": lambda w=w, p=p: comm.Reduce_scatter_block([w, MPI.FLOAT], [p, MPI.FLOAT], op=MPI.SUM),
        }
        for op in OPS:
            results[f"{op} {nbytes}"] = median_us(calls[op], comm.Barrier, nbytes, quick)
    return results if comm.Get_rank() == 0 else {}


# ---- the run ----


def run_turn(library: str, size: int, sizes: list[int], quick: bool) -> dict[str, float] | None:
    """None where the library is not installed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1] / "src"), env.get("PYTHONPATH", "")])
    common = ["--sizes", ",".join(map(str, sizes))] + (["--quick"] if quick else [])
    me = [sys.executable, str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        if library == "mpich":
            mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
            if mpiexec is None or subprocess.run([*me[:1], "-c", "import mpi4py"], capture_output=True).returncode:
                return None
            command = [mpiexec, "-n", str(size), *me, "--turn", library, "--out", str(out), *common]
            subprocess.run(command, env=env, check=True, timeout=300)
        else:
            store = Path(folder) / "store"
            turn = [*me, "--turn", library, "--out", str(out), "--store", str(store), "--of", str(size), *common]
            ranks = [subprocess.Popen([*turn, "--rank", str(r)], env=env) for r in range(size)]
            try:
                codes = [rank.wait(timeout=300) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            if any(codes):
                raise RuntimeError(f"{library} at world size {size}: ranks ended with {codes}")
        return dict(json.loads(out.read_text()))


def busy_share(seconds: float) -> float:
    """The share of all cores' time that others used in the last moments."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as file:
            fields = [int(word) for word in file.readline().split()[1:]]
        return sum(fields), fields[3] + fields[4]

    total, idle = read()
    time.sleep(seconds)
    later, idle_later = read()
    return 1 - (idle_later - idle) / max(later - total, 1)


def wait_for_quiet(limit_s: float) -> float:
    """Returns how busy the machine still is when the turn begins; it is written down beside the figures."""
    until = time.monotonic() + limit_s
    while (busy := busy_share(0.3)) > 0.1 and time.monotonic() < until:
        pass
    return round(busy, 2)


def measure(
    world_sizes: list[int], sizes: list[int], turns: int, quick: bool, busy: list[float]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for size in world_sizes:
        found: dict[str, list[dict[str, float]]] = {library: [] for library in LIBRARIES}
        for _ in range(turns):
            for library in LIBRARIES:
                busy.append(wait_for_quiet(5.0 if quick else 20.0))
                result = run_turn(library, size, sizes, quick)
                if result is not None:
                    found[library].append(result)
        for op in OPS:
            for nbytes in sizes:
                row: dict[str, Any] = {"op": op, "world_size": size, "bytes": nbytes, "us": {}, "spread_us": {}}
                for library, results in found.items():
                    values = [r[f"{op} {nbytes}"] for r in results if r[f"{op} {nbytes}"] == r[f"{op} {nbytes}"]]
                    if values:
                        row["us"][library] = round(statistics.median(values), 1)
                        row["spread_us"][library] = [round(min(values), 1), round(max(values), 1)]
                rows.append(row)
    return rows


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    verdicts = []
    for size, nbytes, ours, theirs, target in TARGETS:
        for row in rows:
            if (row["op"], row["world_size"], row["bytes"]) == ("all_reduce", size, nbytes):
                us = row["us"]
                if ours in us and theirs in us:
                    ratio = round(us[theirs] / us[ours], 2)
                    best = round(row["spread_us"][theirs][0] / row["spread_us"][ours][0], 2)
                    what = f"all_reduce of {nbytes} B, {size} ranks: {ours} against {theirs}"
                    verdicts.append(
                        {"what": what, "ratio": ratio, "best_turns": best, "target": target, "met": ratio >= target}
                    )
    return verdicts


def show(rows: list[dict[str, Any]], verdicts: list[dict[str, Any]]) -> None:
    head = f"{'op':16}{'ranks':>6}{'bytes':>12}" + "".join(f"{name:>12}" for name in LIBRARIES)
    print(head + f"{'gloo/arena':>12}{'gloo/plain':>12}{'mpich/arena':>12}   (times in µs)")
    for row in rows:
        us = row["us"]
        line = f"{row['op']:16}{row['world_size']:>6}{row['bytes']:>12}"
        line += "".join(f"{us[name]:>12.1f}" if name in us else f"{'-':>12}" for name in LIBRARIES)
        for a, b in (("gloo", "arena"), ("gloo", "plain"), ("mpich", "arena")):
            line += f"{us[a] / us[b]:>11.1f}x" if a in us and b in us else f"{'-':>12}"
        print(line)
    for verdict in verdicts:
        word = "met   " if verdict["met"] else "MISSED"
        ratio = f"{verdict['ratio']}x ({verdict['best_turns']}x by best turns)"
        print(f"{word} {verdict['what']}: {ratio}, target {verdict['target']}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, calls and turns")
    parser.add_argument("--world-sizes", default="2,4")
    parser.add_argument("--sizes", default="")
    parser.add_argument("--turns", type=int, default=0)
    for hidden in ("--turn", "--out", "--store", "--rank", "--of"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = [int(s) for s in args.sizes.split(",") if s] or (QUICK_SIZES if args.quick else SIZES)
    if args.turn:
        if args.turn == "mpich":
            results = mpi_turn(sizes, args.quick)
        else:
            results = torch_turn(args.turn, int(args.rank), int(args.of), args.store, sizes, args.quick)
        if results and args.rank in ("", "0"):
            Path(args.out).write_text(json.dumps(results))
        return
    busy: list[float] = []
    world_sizes = [int(n) for n in args.world_sizes.split(",")]
    rows = measure(world_sizes, sizes, args.turns or (2 if args.quick else 3), args.quick, busy)
    verdicts = judge(rows)
    show(rows, verdicts)
    print(f"others used up to {max(busy):.0%} of the machine when a turn began")
    if args.json:
        machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release(), "busy": busy}
        args.json.write_text(json.dumps({"machine": machine, "rows": rows, "verdicts": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
