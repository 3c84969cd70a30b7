"""Batch normalisation over the samples of all ranks, as autograd sees it: one node, one collective each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.api.sync_batch_norm.channel import Channel, Wire
from phalanx.api.sync_batch_norm.header import DTYPES, NO_OPINION, Grads, Header
from phalanx.api.sync_batch_norm.kernels import RunningStats, dense, kernels_for


@dataclass(frozen=True)
class Call:
    """What one use of a layer needs beside tensors that have gradients."""

    channel: Channel
    index: int
    wire: Wire
    running: RunningStats | None
    eps: float


class SyncedNorm(torch.autograd.Function):
    """Every rank of the channel runs forward; where any rank's input needs a gradient, every rank runs backward."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call, grads: Grads
    ) -> Tensor:
        kernels = kernels_for(input.device)
        x = dense(input)
        count = x.numel() // x.size(1)
        first, second = kernels.local_stats(x, call.eps) if count else (None, None)
        header = Header(
            count,
            call.index,
            x.dim() if count else NO_OPINION,
            DTYPES.index(x.dtype) if count else NO_OPINION,
            grads,
        )
        call.channel.announce("forward", call.index, call.wire)
        gathered = call.channel.gather(header, first, second, call.wire)
        if gathered.total < 2:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list(input.shape)} here and {gathered.total} value per channel on all ranks together"
            )
        mean, spread = kernels.combine(gathered.first, gathered.second, gathered.counts, call.running, call.eps)
        ctx.save_for_backward(x, weight, mean, spread)
        ctx.call, ctx.gathered_counts, ctx.reduces = call, gathered.counts, gathered.reduces_in_backward
        return kernels.normalize(x, weight, bias, mean, spread, call.eps) if count else torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, spread = ctx.saved_tensors
        call: Call = ctx.call
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        kernels = kernels_for(x.device)
        grad = dense(grad, like=x)
        if x.numel():
            sum_grad, distance, grad_weight = kernels.backward_sums(grad, x, mean, spread, call.eps)
        else:
            sum_grad = distance = grad_weight = mean.new_zeros(x.size(1))
        grad_input = None
        if ctx.reduces:
            sums = torch.stack([sum_grad.to(call.wire.dtype), distance.to(call.wire.dtype)])
            call.channel.announce("backward", call.index, call.wire)
            call.channel.start_reduce(sums, call.index)()
            if needs_input:
                both = (sums[0], sums[1])
                grad_input = (
                    kernels.backward_input(grad, x, weight, mean, spread, both, ctx.gathered_counts, call.eps)
                    if x.numel()
                    else torch.zeros_like(x)
                )
        return (
            grad_input,
            grad_weight.to(weight.dtype) if needs_weight else None,
            sum_grad.to(weight.dtype if weight is not None else x.dtype) if needs_bias else None,
            None,
            None,
        )
