"""PyTorch's own tests of DDP inside RPC and distributed autograd, run on another library's DDP class.

    python torch_rpc_tests.py -v                      torch's own class: the baseline
    SWAP=phalanx python torch_rpc_tests.py -v         ours in its place

On the CPU, with Gloo: four trainers alone, or four with a remote worker and a master.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The master uses its trainers as soon as its own process group is there, and theirs may not be yet: "Default process group
# has not been initialized", with torch's own class as well. With this, torch waits for all ranks.
os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.nn.parallel
from lines import Lines

if os.environ.get("SWAP"):
    torch.nn.parallel.DistributedDataParallel = importlib.import_module(os.environ["SWAP"]).DistributedDataParallel

from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as theirs
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (
    TensorPipeRpcAgentTestFixture,
)


class _Forked(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        # this process runs no tensor operation, so that its forked children may
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class TestUnderDistAutograd(theirs.DdpUnderDistAutogradTest, TensorPipeRpcAgentTestFixture, _Forked): ...


class TestComparison(theirs.DdpComparisonTest, TensorPipeRpcAgentTestFixture, _Forked): ...


if __name__ == "__main__":
    if sys.argv[1:2] == ["--lines"]:
        for test in sys.argv[2:]:
            case = next((case for case in (TestUnderDistAutograd, TestComparison) if hasattr(case, test)), None)
            if case is None:
                absent = {"test": test, "outcome": "absent", "why": "not in this torch", "seconds": 0}
                print(json.dumps(absent), flush=True)
            else:
                case(test).run(Lines())
    else:
        run_tests()
