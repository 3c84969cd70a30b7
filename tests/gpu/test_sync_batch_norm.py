"""On one GPU, two ranks on Gloo: `SyncBatchNorm` against plain batch normalisation of the concatenated batch.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_sync_batch_norm.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.device_ranks import DEVICE, ON_GPU, autocast, gpu, main, run_checks, several_gpus, torch_ddp

import phalanx as px

pytestmark = gpu
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def _batch(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank)
    return (torch.randn(size, *shape, generator=made, dtype=torch.float64) * (rank + 1) + 2 * rank).to(dtype).to(DEVICE)


def compare(
    sizes: list[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    state: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    **options: object,
) -> None:
    """Against a float64 reference, so that its own rounding does not count."""
    rank = dist.get_rank()
    layer = px.SyncBatchNorm(shape[0], device=DEVICE, dtype=state or dtype, **options)
    reference = nn.BatchNorm1d(shape[0], device=DEVICE, dtype=torch.float64, **options)
    inputs = [_batch(r, n, shape, dtype) for r, n in enumerate(sizes)]
    weights = [_batch(10 + r, n, shape, dtype) / 10 for r, n in enumerate(sizes)]
    for _ in range(2):
        layer.zero_grad()
        reference.zero_grad()
        whole = torch.cat(inputs).double().requires_grad_()
        expected = reference(whole.flatten(2) if whole.dim() > 2 else whole).view_as(whole)
        (expected * torch.cat(weights)).sum().backward()
        x = inputs[rank].clone(memory_format=memory_format).requires_grad_()
        output = layer(x)
        assert output.dtype == dtype and (not x.numel() or output.is_contiguous(memory_format=memory_format))
        (output * weights[rank]).sum().backward()
        close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype], "check_dtype": False}
        torch.testing.assert_close(output, expected.split(sizes)[rank], **close)
        torch.testing.assert_close(x.grad, whole.grad.split(sizes)[rank], **close)
        for one, other in zip(layer.parameters(), reference.parameters(), strict=True):
            total = one.grad.double()
            dist.all_reduce(total)
            scale = max(1.0, other.grad.abs().max().item())
            torch.testing.assert_close(total / scale, other.grad / scale, **close)
        for one, other in zip(layer.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(one, other, **close)


def _error_of(layer: nn.Module, input: torch.Tensor) -> str:
    try:
        layer(input)
    except (ValueError, px.errors.PeerFailedError) as error:
        return str(error)
    return "none"


def check_shapes_and_dtypes() -> None:
    for dtype in (torch.float64, torch.float32):
        for shape in ((3,), (3, 5), (3, 4, 4), (3, 2, 4, 4)):
            compare([4, 7], shape, dtype)
        compare([2, 3], (3, 4, 5), dtype, memory_format=torch.channels_last)
    for dtype in (torch.float16, torch.bfloat16):
        compare([4, 4], (3, 4, 4), dtype, state=torch.float32)
        compare([4, 4], (3, 4, 4), dtype)
        compare([4, 4], (3, 4, 4), dtype, state=torch.float32, memory_format=torch.channels_last)


def check_unequal_batches_and_options() -> None:
    for sizes in ([1, 1], [0, 4], [4, 0]):
        compare(sizes, (3, 4), torch.float32)
    compare([3, 3], (3, 4), torch.float32, affine=False)
    compare([3, 3], (3, 4), torch.float32, track_running_stats=False)
    compare([3, 3], (3, 4), torch.float16, state=torch.float32, track_running_stats=False)
    compare([3, 3], (3, 4), torch.float32, momentum=None)


def check_autocast_and_a_mistake() -> None:
    layer = px.SyncBatchNorm(3, device=DEVICE)
    with autocast(torch.float16):
        assert layer(torch.randn(4, 3, 4, device=DEVICE).half()).dtype == torch.float16
    wrong = torch.randn(4, 2 + dist.get_rank(), device=DEVICE)
    assert "expected an input of 3 channels" in _error_of(layer, wrong)


def check_in_torchs_ddp() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).to(DEVICE)
    model = px.SyncBatchNorm.convert_sync_batchnorm(model)
    if not ON_GPU:  # torch's refuses any such layer there
        return
    torch_ddp(model)(torch.randn(3, 2, 4, 4, device=DEVICE)).sum().backward()


CHECKS = [
    check_shapes_and_dtypes,
    check_unequal_batches_and_options,
    check_autocast_and_a_mistake,
    check_in_torchs_ddp,
]


def test_two_ranks_on_gloo() -> None:
    run_checks(CHECKS, world_size=2, backend="gloo")


@several_gpus
def test_two_ranks_on_nccl() -> None:
    run_checks(CHECKS, world_size=2, backend="nccl")


if __name__ == "__main__":
    main(test_two_ranks_on_gloo, test_two_ranks_on_nccl)
