"""On one GPU, two ranks on Gloo: `SyncBatchNorm` against plain batch normalisation of the concatenated batch.

Runs with torch alone, where there is no pytest: ``PYTHONPATH=src python tests/gpu/test_sync_batch_norm.py``.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import phalanx as px

try:
    import pytest

    pytestmark = pytest.mark.gpu
except ImportError:  # the GPU machine has torch and nothing else
    pytest = None  # type: ignore[assignment]

CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def _batch(rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(rank)
    return (torch.randn(size, *shape, generator=made, dtype=torch.float64) * (rank + 1) + 2 * rank).to(dtype).cuda()


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
    layer = px.SyncBatchNorm(shape[0], device="cuda", dtype=state or dtype, **options)
    reference = nn.BatchNorm1d(shape[0], device="cuda", dtype=torch.float64, **options)
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


def _rank(rank: int, store: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for dtype in (torch.float64, torch.float32):
        for shape in ((3,), (3, 5), (3, 4, 4), (3, 2, 4, 4)):
            compare([4, 7], shape, dtype)
        compare([2, 3], (3, 4, 5), dtype, memory_format=torch.channels_last)
    for dtype in (torch.float16, torch.bfloat16):
        compare([4, 4], (3, 4, 4), dtype, state=torch.float32)
        compare([4, 4], (3, 4, 4), dtype)
        compare([4, 4], (3, 4, 4), dtype, state=torch.float32, memory_format=torch.channels_last)
    for sizes in ([1, 1], [0, 4], [4, 0]):
        compare(sizes, (3, 4), torch.float32)
    compare([3, 3], (3, 4), torch.float32, affine=False)
    compare([3, 3], (3, 4), torch.float32, track_running_stats=False)
    compare([3, 3], (3, 4), torch.float16, state=torch.float32, track_running_stats=False)
    compare([3, 3], (3, 4), torch.float32, momentum=None)
    layer = px.SyncBatchNorm(3, device="cuda")
    with torch.autocast("cuda", torch.float16):
        assert layer(torch.randn(4, 3, 4, device="cuda").half()).dtype == torch.float16
    assert "expected an input of 3 channels" in _error_of(layer, torch.randn(4, 2 + rank, device="cuda"))
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).cuda()
    torch_ddp = nn.parallel.DistributedDataParallel(px.SyncBatchNorm.convert_sync_batchnorm(model), device_ids=[0])
    torch_ddp(torch.randn(3, 2, 4, 4, device="cuda")).sum().backward()
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_on_gloo() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (f"{folder}/store",), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    test_two_ranks_on_gloo()
    print("passed test_two_ranks_on_gloo", flush=True)
