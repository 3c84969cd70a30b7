"""What the tests of `SyncBatchNorm` share: batches by rank, and what one process computes on all of them together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import phalanx as px

CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def batch(rank: int, size: int, shape: Sequence[int], dtype: torch.dtype, *, step: int = 0) -> torch.Tensor:
    """Ranks' means lie apart: statistics of one rank alone would be far off."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randn(size, *shape, generator=made, dtype=torch.float64) * (rank + 1) + 2 * rank).to(dtype)


def factors(rank: int, size: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    made = torch.Generator().manual_seed(77 + rank)
    return torch.randn(size, *shape, generator=made, dtype=torch.float64).to(dtype)


def check_against_one_process(
    layer: px.SyncBatchNorm,
    sizes: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    memory_format: torch.memory_format = torch.contiguous_format,
    steps: int = 2,
    ranks: Sequence[int] | None = None,
) -> None:
    """Outputs, gradients and running estimates of this rank are those of a plain BatchNorm on the concatenated batch."""
    members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
    mine = members.index(dist.get_rank())
    reference = plain(layer)
    for step in range(steps):
        inputs = [batch(r, n, shape, dtype, step=step) for r, n in zip(members, sizes, strict=True)]
        weights = [factors(r, n, shape, dtype) for r, n in zip(members, sizes, strict=True)]
        for model in (layer, reference):
            model.zero_grad()
        whole = torch.cat(inputs).requires_grad_()
        expected = reference(whole)
        (expected * torch.cat(weights)).sum().backward()
        x = inputs[mine].contiguous(memory_format=memory_format).requires_grad_()
        output = layer(x)
        assert output.dtype == x.dtype and output.shape == x.shape
        if x.numel():
            assert output.is_contiguous(memory_format=memory_format)
        (output * weights[mine]).sum().backward()
        close = {"rtol": CLOSE[dtype], "atol": CLOSE[dtype]}
        torch.testing.assert_close(output, expected.split(list(sizes))[mine], **close)
        torch.testing.assert_close(x.grad, whole.grad.split(list(sizes))[mine], **close)
        for one, other in zip(layer.parameters(), reference.parameters(), strict=True):
            total = one.grad.clone()
            dist.all_reduce(total, group=layer.process_group)
            scale = max(1.0, other.grad.abs().max().item())
            torch.testing.assert_close(total / scale, other.grad / scale, **close)
        for (name, one), other in zip(layer.named_buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(one, other, **close, msg=lambda text, name=name: f"{name}: {text}")


def plain(layer: nn.Module) -> nn.BatchNorm3d:
    """A BatchNorm of torch's with the same state, for inputs of any number of dimensions."""
    made = _AnyBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, dtype=_dtype_of(layer)
    )
    if layer.affine and layer.bias is None:
        made.register_parameter("bias", None)
    made.load_state_dict(layer.state_dict())
    return made


def _dtype_of(layer: nn.Module) -> torch.dtype | None:
    floating = [t.dtype for t in layer.state_dict().values() if t.is_floating_point()]
    return floating[0] if floating else None


class _AnyBatchNorm(nn.BatchNorm3d):
    def _check_input_dim(self, input: torch.Tensor) -> None:
        return None
