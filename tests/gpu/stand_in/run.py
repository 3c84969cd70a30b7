"""Runs a program on a stand-in for a GPU, where there is none: torch's CUDA build, with nothing of CUDA behind it.

    python tests/gpu/stand_in/run.py benchmarks/gpu_step.py --models gpt --without-memory
    python tests/gpu/stand_in/run.py --values tests/gpu/run_all.py
    python tests/gpu/stand_in/run.py --values --races tests/gpu/test_streams.py
    python tests/gpu/stand_in/run.py --values --devices 4 --ranks-on-nccl -- -m pytest tests/ranks/test_ddp_no_sync.py

What it is for, and what it cannot show: README.md beside this file. It wants a Python with torch's CUDA build (13.x) and
the package nvidia-cuda-crt, and gcc; `make test-stand-in` sets that Python up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def built(folder: Path) -> Path:
    """The library, under the names by which torch asks for it."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    headers = [*packages.glob("cu[0-9]*/include"), *packages.glob("nccl/include")]
    if len(headers) < 2:
        raise SystemExit("this Python has no CUDA build of torch: see tests/gpu/stand_in/README.md")
    library = folder / "libcuda.so.1"
    sources = [str(HERE / name) for name in ("runtime.c", "libraries.c", "nccl.c")]
    command = [
        "gcc",
        "-O2",
        "-fPIC",
        "-shared",
        "-w",
        *[f"-I{folder}" for folder in headers],
        "-o",
        str(library),
        *sources,
        "-lpthread",
        "-ldl",
    ]
    subprocess.run(command, check=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--values", action="store_true", help="let the CPU do what kernels would: slow, and it computes"
    )
    parser.add_argument("--races", action="store_true", help="with torch's sanitizer, which looks for unjoined streams")
    parser.add_argument("--devices", type=int, default=1, help="how many GPUs there seem to be")
    parser.add_argument("--ranks-on-nccl", action="store_true", help="tests written for ranks on the CPU run on NCCL")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a script and its arguments; behind --, Python's own")
    arguments = parser.parse_args()
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        parser.error("which program?")
    with tempfile.TemporaryDirectory() as folder:
        library = built(Path(folder))
        paths = [str(HERE / "site"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": folder,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "STAND_IN_DEVICES": str(arguments.devices),
            "OMP_NUM_THREADS": "1",
        }
        if arguments.values:
            environment["STAND_IN_VALUES"] = "1"
        if arguments.races:
            environment["TORCH_CUDA_SANITIZER"] = "1"
        if arguments.ranks_on_nccl:
            environment["STAND_IN_RANKS_ON_NCCL"] = "1"
        raise SystemExit(subprocess.run([sys.executable, *program], env=environment).returncode)


if __name__ == "__main__":
    main()
