"""The hooks that torch's DDP has built in, by their torch names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from phalanx.hooks.call import TorchHook


def builtin_hook(kind: dist.BuiltinCommHookType) -> TorchHook:
    """The hook for one of torch's built-in kinds. Its state is the process group."""
    if kind == dist.BuiltinCommHookType.ALLREDUCE:
        return allreduce
    if kind == dist.BuiltinCommHookType.FP16_COMPRESS:
        return fp16_compress
    raise ValueError(f"unknown built-in communication hook {kind}")


def allreduce(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The average, divided before it is summed."""
    return summed(bucket.buffer().div_(group.size()), group)


def fp16_compress(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The average, summed in half precision."""
    buffer = bucket.buffer()
    halved = buffer.to(torch.float16).div_(group.size())
    return summed(halved, group).then(lambda future: buffer.copy_(future.value()))


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """A future of the tensor, summed in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])
