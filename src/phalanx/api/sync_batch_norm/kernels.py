"""The arithmetic of batch normalisation in parts, between which ranks communicate: on the CPU, and with CUDA's kernels.

Both take inputs that are dense, in the plain order or channels last, and compute in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_FUSED_DEVICES = ("cuda", "xpu", "hpu")


@dataclass
class RunningStats:
    """A layer's running estimates, and how much of a new batch goes into them (None: all batches weigh the same)."""

    mean: Tensor | None
    var: Tensor | None
    num_batches: Tensor | None
    momentum: float | None

    def next_factor(self) -> float:
        """The share of the batch that is now entered."""
        if self.num_batches is not None:
            self.num_batches.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches.item())
        return 0.0 if self.momentum is None else self.momentum


class Kernels(Protocol):
    """`spread` is the variance or its inverse root, whichever suits; it stays between these methods."""

    def local_stats(self, input: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def combine(
        self, means: Tensor, spreads: Tensor, counts: Sequence[int], running: RunningStats | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Mean and spread of all ranks' samples, from a row per rank; enters them into the running estimates."""

    def normalize(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> Tensor: ...

    def backward_sums(
        self, grad: Tensor, input: Tensor, mean: Tensor, spread: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Per channel: the sum of the gradient, its sum times the input's distance from the mean, and the weight's
        gradient."""

    def backward_input(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        sums: tuple[Tensor, Tensor],
        counts: Sequence[int],
        eps: float,
    ) -> Tensor: ...


def kernels_for(device: torch.device) -> Kernels:
    return FusedKernels() if device.type in _FUSED_DEVICES else NativeKernels()


def dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The tensor without gaps: channels last where it is so already (or where `like` is), else in the plain order."""
    return tensor.contiguous(memory_format=_memory_format(tensor if like is None else like))


def _memory_format(tensor: Tensor) -> torch.memory_format:
    if tensor.is_contiguous():
        return torch.contiguous_format
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


def _compute_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32


class NativeKernels:
    """For the CPU. Statistics travel and are combined in float64; `spread` is the biased variance."""

    def local_stats(self, input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        # Two quick passes (a mean, then squares of distances from it), several times as fast as torch.var_mean. The
        # running estimates that it asks for are scratch: they make it answer in float32 where the input is half.
        dtype = _compute_dtype(input)
        scratch = torch.zeros(2, input.size(1), dtype=dtype, device=input.device)
        mean, var = torch.batch_norm_update_stats(input, scratch[0], scratch[1], 0.0)
        return mean, var

    def combine(
        self, means: Tensor, spreads: Tensor, counts: Sequence[int], running: RunningStats | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = sum(counts)
        shares = torch.tensor(counts, dtype=means.dtype, device=means.device).div_(total).unsqueeze_(1)
        mean = (means * shares).sum(0)
        # Within ranks and between them. Never the mean of squares less the square of the mean, which cancels.
        var = ((spreads + (means - mean).square_()) * shares).sum(0)
        if running is not None:
            factor = running.next_factor()
            _enter(running.mean, mean, factor)
            _enter(running.var, var * (total / (total - 1)), factor)
        return mean, var

    def normalize(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> Tensor:
        dtype = _compute_dtype(input)
        return torch.native_batch_norm(
            input, _as(weight, dtype), _as(bias, dtype), mean.to(dtype), spread.to(dtype), False, 0.0, eps
        )[0]

    def backward_sums(
        self, grad: Tensor, input: Tensor, mean: Tensor, spread: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        # As in evaluation, where mean and variance are constants, the gradients of weight and bias are the sums.
        dtype = _compute_dtype(input)
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, input, None, mean.to(dtype), spread.to(dtype), None, None, False, eps, [False, True, True]
        )
        distance = grad_weight.to(spread.dtype) * (spread + eps).sqrt_()
        return grad_bias, distance, grad_weight

    def backward_input(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        sums: tuple[Tensor, Tensor],
        counts: Sequence[int],
        eps: float,
    ) -> Tensor:
        # scale · (grad − mean(grad) − (input − mean) · mean(grad · (input − mean)) / var): one line per channel in grad
        # and input, whose coefficients are made in float64.
        total = sum(counts)
        inverse = (spread + eps).rsqrt_()
        scale = inverse if weight is None else inverse * weight
        slope = -scale * inverse.square() * sums[1] / total
        offset = -scale * sums[0] / total - slope * mean
        dtype, shape = _compute_dtype(input), (1, -1, *[1] * (input.dim() - 2))
        scale, slope, offset = (vector.to(dtype).view(shape) for vector in (scale, slope, offset))
        x = input.to(dtype)
        if _memory_format(input) is torch.contiguous_format:
            result = torch.mul(grad, scale).addcmul_(x, slope).add_(offset)
        else:  # one pass less, and slower in the plain order, where it does not vectorise
            result = torch.addcmul(offset, grad.to(dtype), scale).addcmul_(x, slope)
        return result.to(input.dtype)


class FusedKernels:
    """torch's kernels for accelerators; `spread` is the inverse root of variance and eps."""

    def local_stats(self, input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean, inverse = torch.batch_norm_stats(input, eps)
        return mean, inverse

    def combine(
        self, means: Tensor, spreads: Tensor, counts: Sequence[int], running: RunningStats | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        factor = 0.0 if running is None else running.next_factor()
        estimates = [None if running is None else _as(t, means.dtype) for t in _pair(running)]
        # The first argument is there for its dtype: with a half input the kernel would ask for counts in half, too.
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            means,
            means.contiguous(),
            spreads.contiguous(),
            estimates[0],
            estimates[1],
            factor,
            eps,
            _vector(counts, means.dtype, means.device),
        )
        for kept, fresh in zip(_pair(running), estimates, strict=True):
            if kept is not None and fresh is not None and fresh is not kept:
                kept.copy_(fresh)
        return mean, inverse

    def normalize(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, spread: Tensor, eps: float
    ) -> Tensor:
        return torch.batch_norm_elemt(input, weight, bias, mean, spread, eps)

    def backward_sums(
        self, grad: Tensor, input: Tensor, mean: Tensor, spread: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sum_grad, distance, _, _ = torch.batch_norm_backward_reduce(grad, input, mean, spread, None, True, False, False)
        return sum_grad, distance, distance * spread

    def backward_input(
        self,
        grad: Tensor,
        input: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        sums: tuple[Tensor, Tensor],
        counts: Sequence[int],
        eps: float,
    ) -> Tensor:
        return torch.batch_norm_backward_elemt(
            grad,
            input,
            mean,
            spread,
            _as(weight, mean.dtype),
            sums[0].contiguous(),
            sums[1].contiguous(),
            _vector(counts, torch.int32, input.device),
        )


def _vector(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Equal values are filled in on the device: a copy from the host waits, and cannot be recorded in a CUDA graph."""
    if len(set(values)) == 1:
        return torch.full((len(values),), values[0], dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device=device)


def _pair(running: RunningStats | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if running is None else (running.mean, running.var)


def _as(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(dtype).contiguous()


def _enter(estimate: Tensor | None, fresh: Tensor, factor: float) -> None:
    if estimate is not None:
        estimate.copy_(torch.lerp(estimate.to(fresh.dtype), fresh, factor))
