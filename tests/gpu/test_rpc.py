"""On one GPU: DDP under distributed autograd. A part of the model on another worker's CPU, the replicated one on the GPU.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_rpc.py``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import CLOSE, DEVICE, ON_GPU, TIMEOUT_S, TorchDDP, data, device_ids, gpu, main

import phalanx as px

pytestmark = gpu

TRAINERS = 2
DIM = 8


class RemoteTable(nn.Module):
    """Lives on the last worker, on its CPU; every trainer of a class has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(DIM, DIM)
        # Not by a seed of the process: both trainers' tables are made at the same time, in threads of this worker.
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table(x))

    def parameter_refs(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters()]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(DIM, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def averages_of(module: nn.Module, hidden: torch.Tensor, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """What all trainers' gradients are on average, computed here, by plain autograd, from what each gives the module."""
    parameters = dict(module.named_parameters())
    inputs = [torch.empty_like(hidden) for _ in range(TRAINERS)]
    dist.all_gather(inputs, hidden.detach(), group=group)
    losses = [module(one.to(DEVICE)).square().mean() for one in inputs]
    found = torch.autograd.grad(torch.stack(losses).mean(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def train(cls: type[nn.Module], group: dist.ProcessGroup, *, remote: bool) -> dict[str, torch.Tensor]:
    rank = dist.get_rank(group)
    module = Head().to(DEVICE)
    model = cls(module, device_ids=device_ids(), process_group=group)
    table = rpc.remote("table", RemoteTable)
    refs = [rpc.RRef(parameter) for parameter in module.parameters()]
    refs += table.rpc_sync().parameter_refs() if remote else []
    optimizer = DistributedOptimizer(torch.optim.SGD, refs, lr=0.05)
    result: dict[str, torch.Tensor] = {}
    for step in range(8):
        x = data(rank, step, 5, DIM).cpu()
        with dist_autograd.context() as context:
            hidden = table.rpc_sync().forward(x) if remote else x
            averages = averages_of(module, hidden, group)
            loss = model(hidden.to(DEVICE)).square().mean()
            dist_autograd.backward(context, [loss])
            found = dist_autograd.get_gradients(context)
            for name, parameter in module.named_parameters():
                result[f"gradient of {name} in step {step}"] = found[parameter].detach().clone()
                where = f"{cls.__module__}'s gradient of {name} in step {step}"
                torch.testing.assert_close(
                    found[parameter], averages[name], msg=lambda text, where=where: f"{where}: {text}", **CLOSE
                )
            optimizer.step(context)
    result |= {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    if remote:
        result |= {f"remote {place}": value for place, value in enumerate(table.rpc_sync().values())}
    return result


def _worker(rank: int, store: str) -> None:
    warnings.simplefilter("ignore")
    if ON_GPU:
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    name = "table" if rank == TRAINERS else f"trainer{rank}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}_rpc", rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(name, rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    if rank < TRAINERS:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=TRAINERS, timeout=timedelta(seconds=TIMEOUT_S)
        )
        for remote in (False, True):
            theirs = train(TorchDDP, dist.new_group(), remote=remote)
            ours = train(px.DistributedDataParallel, dist.new_group(), remote=remote)
            assert ours.keys() == theirs.keys()
            for what, value in ours.items():
                torch.testing.assert_close(value, theirs[what], msg=lambda text, what=what: f"{what}: {text}", **CLOSE)
        dist.barrier()
        dist.destroy_process_group()
    rpc.shutdown()


def test_two_trainers_and_a_table() -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_worker, (f"{folder}/store",), nprocs=TRAINERS + 1, start_method="spawn")


if __name__ == "__main__":
    main(test_two_trainers_and_a_table)
