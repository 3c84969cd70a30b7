"""On one GPU: mixed precision and optimizers in backward, alone on NCCL and as two ranks on Gloo.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_precision.py``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import ALONE, DEVICE, ON_GPU, device_ids, gpu, main, run_checks, several_gpus

import phalanx as px

pytestmark = gpu
BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.out_of = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_of(torch.tanh(self.norm(self.into(x))))


class Recurrent(nn.Module):
    """cuDNN keeps the weights of these in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)


def by_hand(module: nn.Module, step: int, dtype: torch.dtype, wire: torch.dtype) -> list[torch.Tensor]:
    """The average that all ranks must hold, in one process: casts that autograd follows, sums in the wire's dtype."""
    size = dist.get_world_size()
    names, total = dict(module.named_parameters()), None
    for rank in range(size):
        casts = {name: parameter.to(dtype) for name, parameter in names.items()}
        loss = functional_call(module, casts, (batch(rank, step).to(dtype),)).float().square().mean()
        parts = [(part / size).to(wire) for part in torch.autograd.grad(loss, list(names.values()))]
        total = parts if total is None else [old + new for old, new in zip(total, parts, strict=True)]
    assert total is not None
    return [part.float() for part in total]


def check_precision() -> None:
    rank = dist.get_rank()
    for make in (Net, Recurrent):
        for dtype in (BF16, FP16) if ON_GPU else (BF16,):
            policy = px.Precision(param_dtype=dtype, reduce_dtype=dtype)
            config = _MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
            wraps: list[Callable[[nn.Module], nn.Module]] = [
                lambda module, policy=policy: px.replicate(module, precision=policy),
                lambda module, config=config: px.DistributedDataParallel(
                    module, device_ids=device_ids(), mixed_precision=config, gradient_as_bucket_view=True
                ),
                lambda module, config=config: px.DistributedDataParallel(
                    module, device_ids=device_ids(), mixed_precision=config, static_graph=True
                ),
            ]
            for wrap in wraps:
                torch.manual_seed(0)
                module = make().to(DEVICE)
                reference = copy.deepcopy(module)
                model = wrap(module)
                for step in range(4):
                    model.zero_grad(set_to_none=step % 2 == 0)
                    out = model(batch(rank, step))
                    assert out.dtype is dtype
                    out.float().square().mean().backward()
                    wanted = by_hand(reference, step, dtype, dtype)
                    for (name, parameter), average in zip(module.named_parameters(), wanted, strict=True):
                        assert isinstance(parameter, nn.Parameter) and parameter.grad.dtype is torch.float32
                        torch.testing.assert_close(
                            parameter.grad, average, rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}"
                        )
                copy.deepcopy(module)


def check_kept_full() -> None:
    policy = px.Precision(param_dtype=BF16, buffer_dtype=BF16, output_dtype=torch.float32, keep_full=px.NORM_LAYERS)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(DEVICE)
    model = px.replicate(model.to(memory_format=torch.channels_last), precision=policy)
    for _ in range(3):
        out = model(torch.randn(4, 3, 8, 8, device=DEVICE).to(memory_format=torch.channels_last))
        assert out.dtype is torch.float32
        out.square().mean().backward()
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}
    assert model[1].num_batches_tracked.item() == 3 and model[1].running_mean.abs().sum() > 0


def check_in_backward() -> None:
    rank = dist.get_rank()
    for cls, options in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 0.01})):
        results = []
        for way in ("by hand", "replicate", "ddp", "fused"):
            torch.manual_seed(0)
            module = Net().to(DEVICE)
            model = px.DistributedDataParallel(module, device_ids=device_ids()) if way in ("ddp", "fused") else module
            if way in ("by hand", "replicate"):
                px.replicate(module)
            if way == "fused":
                model._register_fused_optim(cls, **options)
            optimizer = cls(module.parameters(), **options)
            if way in ("replicate", "ddp"):
                px.step_in_backward(model, optimizer)
            for step in range(5):
                model(batch(rank, step)).square().mean().backward()
                if way == "by hand":
                    optimizer.step()
                model.zero_grad()
            results.append([parameter.detach().clone() for parameter in module.parameters()])
        for other in results[1:]:
            assert all(torch.equal(mine, wanted) for mine, wanted in zip(other, results[0], strict=True))


CHECKS = [check_precision, check_kept_full, check_in_backward]


def test_alone_on_nccl() -> None:
    run_checks(CHECKS, world_size=1, backend=ALONE)


def test_two_ranks_on_gloo() -> None:
    run_checks(CHECKS, world_size=2, backend="gloo")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(test_alone_on_nccl, test_two_ranks_on_gloo, test_two_ranks_on_nccl)
