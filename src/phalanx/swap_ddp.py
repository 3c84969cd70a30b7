"""Run a program on Phalanx's DistributedDataParallel without editing it, as in:

    torchrun --nproc-per-node 2 -m phalanx.swap_ddp train.py --lr 0.1
    torchrun --nproc-per-node 2 -m phalanx.swap_ddp -m package.train --lr 0.1

Everything behind the program's name is the program's own. It runs as `python train.py --lr 0.1` would run it. Processes
that it starts (multiprocessing, Lightning's own launcher) are swapped too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from phalanx.compose.child_processes import swap_in_children
from phalanx.compose.main_program import ProgramNotFoundError, run_module, run_script
from phalanx.compose.swap import Swap, swap_ddp

USAGE = """\
usage: python -m phalanx.swap_ddp [--sync-batchnorm] [--sampler] (script.py | -m module) [arguments ...]

Runs the program with Phalanx's DistributedDataParallel in the place of torch's.

  --sync-batchnorm   Phalanx's SyncBatchNorm in the place of torch's too
  --sampler          Phalanx's DistributedSampler in the place of torch's too
"""
_OPTIONS = {"--sync-batchnorm": "sync_batchnorm", "--sampler": "sampler"}


def main(arguments: Sequence[str]) -> None:
    rest = list(arguments)
    options: dict[str, bool] = {}
    while rest and rest[0] in _OPTIONS:
        options[_OPTIONS[rest.pop(0)]] = True
    if rest and rest[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    as_module = rest[:1] == ["-m"]
    if as_module:
        rest.pop(0)
    if not rest:
        _refuse("which module? `-m` is followed by its name" if as_module else "which program?")
    if rest[0].startswith("-"):
        _refuse(f"{rest[0]} is not an option of swap_ddp; options of the program come after its name")
    try:
        swap_ddp(**options)
    except ValueError as error:
        _refuse(str(error))
    swap_in_children(**options)
    try:
        (run_module if as_module else run_script)(rest[0], rest[1:])
    except ProgramNotFoundError as error:
        print(f"swap_ddp: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _refuse(why: str) -> NoReturn:
    print(f"{USAGE}\nswap_ddp: {why}", file=sys.stderr)
    raise SystemExit(2)


class _CallableModule(ModuleType):
    """Importing this module binds it to the name `phalanx.swap_ddp`, where the function of that name was. So it is both."""

    def __call__(self, **options: Any) -> Swap:
        return swap_ddp(**options)


if __name__ == "__main__":
    main(sys.argv[1:])
else:
    sys.modules[__name__].__class__ = _CallableModule
