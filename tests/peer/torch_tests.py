"""PyTorch's own distributed tests (they ship inside the torch wheel), run on another library's classes or process group.

    python torch_tests.py -v TestPeer.test_ddp_namedtuple      torch's own: the baseline
    SWAP=phalanx python torch_tests.py -v …                    every name in SWAPPED that `phalanx` has, in torch's place
    GROUP=phalanx python torch_tests.py -v …                   `import phalanx`, then process groups of backend "phalanx"

BACKEND (default gloo) is the backend that the tests believe they run on, and so which of them skip themselves: with GROUP,
BACKEND=gloo runs what torch runs on Gloo, and BACKEND=mpi adds the all_to_all tests, which torch runs on MPI alone.
WORLD_SIZE (default 2) sets the number of ranks. Tests written for one GPU per rank run with all ranks on one device
(see one_device.py): the CPU, or with DEVICE=cuda:0 that GPU. DEVICE=own gives every rank its own, as they were written.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers
import torch.distributed.algorithms.model_averaging.hierarchical_model_averager
import torch.distributed.optim.post_localSGD_optimizer
import torch.nn.parallel.distributed
import torch.utils.data.distributed
from lines import Lines
from one_device import on_one_device, share

AVERAGING = torch.distributed.algorithms.model_averaging
SWAPPED = {
    "DistributedDataParallel": (torch.nn.parallel, torch.nn.parallel.distributed),
    "SyncBatchNorm": (torch.nn, torch.nn.modules),
    "DistributedSampler": (torch.utils.data, torch.utils.data.distributed),
    "PeriodicModelAverager": (AVERAGING.averagers,),
    "HierarchicalModelAverager": (AVERAGING.hierarchical_model_averager,),
    "PostLocalSGDOptimizer": (torch.distributed.optim, torch.distributed.optim.post_localSGD_optimizer),
}


def put(name: str, cls: type) -> None:
    for module in SWAPPED[name]:
        setattr(module, name, cls)


def with_group(believed: str, actual: str) -> None:
    """Process groups asked for as `believed`, or by default, are made by backend `actual`."""
    importlib.import_module(actual)
    if believed == "mpi":
        dist.is_mpi_available = lambda: True

    def redirect(make):
        @functools.wraps(make)
        def wrapper(*args, **kwargs):
            if args and args[0] == believed:
                args = (actual, *args[1:])
            if kwargs.get("backend") == believed:
                kwargs["backend"] = actual
            return make(*args, **kwargs)

        return wrapper

    dist.init_process_group, dist.new_group = redirect(dist.init_process_group), redirect(dist.new_group)


if os.environ.get("SWAP"):
    ours = importlib.import_module(os.environ["SWAP"])
    for name in SWAPPED:
        if hasattr(ours, name):
            put(name, getattr(ours, name))
if os.environ.get("GROUP"):
    with_group(os.environ["BACKEND"], os.environ["GROUP"])
device = os.environ.get("DEVICE", "cpu")
if device != "own":
    share(device, int(os.environ["WORLD_SIZE"]))
    put("DistributedDataParallel", on_one_device(torch.nn.parallel.DistributedDataParallel, device))

from torch.testing._internal.common_distributed import initialize_temp_directories  # noqa: E402
from torch.testing._internal.common_utils import run_tests  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

if os.environ.get("GROUP"):  # their profiler events are checked too
    for profiled in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(distributed_test, profiled).append(os.environ["GROUP"])


class TestPeer(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        if device.startswith("cuda"):
            self._spawn_processes()
        else:
            # this process runs no tensor operation, so that its forked children may
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def _run_uneven_inputs_test(self, test_case, *args, **kwargs):
        # On one thread a convolution over its 1000 x 1000 image takes a minute, a hundred times over.
        if device == "cpu" and test_case.name == "large_conv_model":
            test_case = test_case._replace(inp=test_case.inp[..., :40, :40].contiguous())
        super()._run_uneven_inputs_test(test_case, *args, **kwargs)


if __name__ == "__main__":
    initialize_temp_directories()
    if sys.argv[1:2] == ["--lines"]:
        for test in sys.argv[2:]:
            TestPeer(test).run(Lines()) if hasattr(TestPeer, test) else print(
                json.dumps({"test": test, "outcome": "absent", "why": "not in this torch", "seconds": 0}), flush=True
            )
    else:
        run_tests()
