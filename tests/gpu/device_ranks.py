"""Ranks on one GPU for `tests/gpu`, with torch alone: one process group per set of checks, many checks in it.

`GPU_TESTS_DEVICE=cpu` runs the same checks on the CPU, with Gloo in NCCL's place: to find mistakes in the tests where
there is no GPU. It shows nothing about streams. What `stand_in` shows is said there.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import phalanx as px

try:
    import pytest

    gpu = [
        pytest.mark.gpu,
        pytest.mark.timeout(300),
        pytest.mark.skipif(
            not torch.cuda.is_available() and "GPU_TESTS_DEVICE" not in os.environ,
            reason="there is no GPU, and GPU_TESTS_DEVICE does not name another device",
        ),
    ]
except ImportError:  # the GPU machine has torch and nothing else
    gpu = []

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
ON_STAND_IN = "STAND_IN_DEVICES" in os.environ
ALONE = "nccl" if ON_GPU else "gloo"
TIMEOUT_S = 60

Check = Callable[[], None]
Wrap = Callable[[nn.Module], nn.Module]
TorchDDP = nn.parallel.DistributedDataParallel


def device_ids() -> list[int] | None:
    """What a script says of this rank's device."""
    return [torch.cuda.current_device()] if ON_GPU else None


OURS: dict[str, Wrap] = {
    "replicate": lambda module: px.replicate(module),
    "replicate, small buckets": lambda module: px.replicate(module, bucket_bytes=2048, first_bucket_bytes=256),
    "ddp": lambda module: px.DistributedDataParallel(module, device_ids=device_ids()),
    "ddp, views": lambda module: px.DistributedDataParallel(
        module, device_ids=device_ids(), gradient_as_bucket_view=True, bucket_cap_mb=0.002
    ),
    "ddp, unused": lambda module: px.DistributedDataParallel(
        module, device_ids=device_ids(), find_unused_parameters=True, bucket_cap_mb=0.002
    ),
}


def torch_ddp(module: nn.Module, **options: Any) -> TorchDDP:
    return TorchDDP(module, device_ids=device_ids(), **options)


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, TorchDDP) else model


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def autocast(dtype: torch.dtype, *, enabled: bool = True) -> Any:
    return torch.autocast(DEVICE, dtype, enabled=enabled)


# -- comparing ---------------------------------------------------------------------------------------------------------

State = dict[str, torch.Tensor]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def compare(run: Callable[[str], State], ours: Sequence[str], *, close: Mapping[str, float] | None = None) -> None:
    """`run("torch")` against `run` of each of ours: to the bit if torch's own two runs agree so, else all but."""
    theirs, again = run("torch"), run("torch")
    deterministic = all(torch.equal(theirs[name], again[name]) for name in theirs)
    for which in ours:
        mine = run(which)
        assert mine.keys() == theirs.keys(), (which, set(mine) ^ set(theirs))
        for name, value in mine.items():
            limits = {"rtol": 0.0, "atol": 0.0} if close is None and deterministic else {**CLOSE, **(close or {})}
            torch.testing.assert_close(
                value,
                theirs[name],
                equal_nan=True,
                msg=lambda text, where=f"{which}: {name}": f"{where}: {text}",
                **limits,
            )


def parameters_of(model: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in bare(model).named_parameters()}


def data(rank: int, step: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """That rank's input in that step: made on the CPU, so that it is the same everywhere."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))
    return made.to(DEVICE, dtype)


def beyond_the_stand_in(why: str, *, on: str = "") -> Callable[[Check], Check]:
    """A check that `stand_in` leaves out, with any backend or on this one."""

    def mark(check: Check) -> Check:
        _BEYOND_THE_STAND_IN[check.__name__] = (why, on)
        return check

    return mark


_BEYOND_THE_STAND_IN: dict[str, tuple[str, str]] = {}


Test = Callable[[], None]


def several_gpus(test: Test) -> Test:
    """A test whose ranks need a GPU each, as NCCL wants it. `stand_in/run.py --devices 2` has two."""
    if ON_GPU and torch.cuda.device_count() >= 2:
        return test
    why = "NCCL takes one rank per GPU, and there are not two"
    _LEFT_OUT[test.__name__] = why
    return pytest.mark.skip(reason=why)(test) if gpu else test


_LEFT_OUT: dict[str, str] = {}


# -- running -----------------------------------------------------------------------------------------------------------


def run_checks(checks: Sequence[Check], *, world_size: int, backend: str) -> None:
    """Run all checks in fresh processes; each that fails is shown, and the others are run all the same.

    Ranks on Gloo share the first GPU; others have one each, as NCCL wants it.
    """
    # cuBLAS is deterministic only with a workspace of fixed size, which it reads when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the output is cut to its end: nothing but results
    only = os.environ.get("GPU_TESTS_ONLY", "")
    chosen = [check for check in checks if only in check.__name__ and not _left_out(check, backend)]
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (world_size, backend, f"{folder}/store", chosen), nprocs=world_size, start_method="spawn"
        )


def _left_out(check: Check, backend: str) -> bool:
    why, on = _BEYOND_THE_STAND_IN.get(check.__name__, ("", ""))
    left_out = ON_STAND_IN and bool(why) and on in ("", backend)
    if left_out:
        print(f"  left out {check.__name__}: {why}", flush=True)
    return left_out


def _rank(rank: int, world_size: int, backend: str, file: str, checks: Sequence[Check]) -> None:
    if ON_GPU:
        torch.cuda.set_device(0 if backend == "gloo" else rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.simplefilter("ignore")
    logging.getLogger("phalanx").setLevel(logging.ERROR)
    store = dist.FileStore(file, world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    failed = []
    for number, check in enumerate(checks):
        began = time.perf_counter()
        try:
            check()
            synchronize()
            said = "ok"
        except Exception as error:
            said = "failed"
            failed.append(check.__name__)
            print(f"rank {rank} of {world_size}, {check.__name__}: {type(error).__name__}", flush=True)
            traceback.print_exc()
            traceback.clear_frames(error.__traceback__)
        if rank == 0:
            print(f"  {said} {check.__name__} ({time.perf_counter() - began:.1f} s)", flush=True)
        # Together into the next, whoever has failed: through the store, as the group may be of no use any more.
        store.set(f"{number}/{rank}", said)
        store.wait([f"{number}/{other}" for other in range(world_size)], timedelta(seconds=TIMEOUT_S))
    # A group ends its threads when nobody holds it any more, and models do: one that lets go of a tensor while the
    # interpreter ends aborts the process.
    gc.collect()
    if dist.is_initialized():  # a check may have ended it
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    if failed:
        raise AssertionError(f"rank {rank} of {world_size} on {backend}: {', '.join(failed)} failed")


def main(*tests: Test) -> None:
    """For a file that is run as a program."""
    failed = 0
    for test in tests:
        if test.__name__ in _LEFT_OUT:
            print("left out", test.__name__, "as", _LEFT_OUT[test.__name__], flush=True)
            continue
        began = time.perf_counter()
        try:
            test()
            print(f"passed {test.__name__} ({time.perf_counter() - began:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print("FAILED", test.__name__, flush=True)
            traceback.print_exc()
    raise SystemExit(failed)
