"""Whether a function can be a communication hook: what torch asks of it when it is registered, in torch's words."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist


def problem_with_hook(hook: Any) -> Exception | None:
    """What is wrong with a hook, as the error to raise; None where nothing is."""
    if not callable(hook):
        return TypeError("Communication hook must be callable.")
    if not _takes_state_and_bucket(hook):
        return TypeError(
            f"a communication hook is called as hook(state, bucket); {getattr(hook, '__qualname__', hook)} does not take "
            "these two arguments"
        )
    bucket, returned = _annotations(hook)
    if bucket not in (inspect.Parameter.empty, Any, dist.GradBucket):
        return ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    if returned not in (inspect.Signature.empty, Any, torch.futures.Future[torch.Tensor]):
        return ValueError("Communication hook: return annotation should be torch.futures.Future[torch.Tensor].")
    if getattr(hook, "__name__", "") in ("bf16_compress_hook", "bf16_compress_wrapper_hook") and not _bf16_reduces():
        return TypeError("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+ or XPU and XCCL")
    return None


def _takes_state_and_bucket(hook: Any) -> bool:
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # one in C, say: nobody knows
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def _annotations(hook: Any) -> tuple[Any, Any]:
    """Of the bucket and of what is returned; those that are text and cannot be looked up say nothing."""
    empty = inspect.Parameter.empty
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, AttributeError, TypeError, ValueError, SyntaxError):
        return empty, empty
    bucket = signature.parameters.get("bucket")
    return empty if bucket is None else bucket.annotation, signature.return_annotation


def _bf16_reduces() -> bool:
    cuda = torch.version.cuda is not None or torch.version.hip is not None
    if cuda and dist.is_nccl_available():
        return bool(torch.cuda.nccl.version() >= (2, 10))
    return bool(dist.is_xccl_available() and torch.xpu.is_available())
