"""torch's `_MixedPrecision`, as the policy that it is: parameters for the time of forward, buffers for good."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from phalanx.api.precision import Precision, check_dtype


def precision_of(config: Any) -> Precision | None:
    """The constructor's `mixed_precision`, checked. As in torch, gradients are reduced as they are computed by default."""
    if config is None or isinstance(config, Precision):
        return config
    if not isinstance(config, _MixedPrecision):
        raise TypeError(
            "mixed_precision takes torch.nn.parallel.distributed._MixedPrecision or phalanx.Precision, got "
            f"{type(config).__name__}"
        )
    check_dtype("buffer_dtype", config.buffer_dtype)
    return Precision(
        param_dtype=config.param_dtype,
        reduce_dtype=config.reduce_dtype or config.param_dtype,
        cast_inputs=getattr(config, "cast_forward_inputs", True),
    )


def cast_module(module: nn.Module, config: Any, ignored: Collection[str]) -> None:
    """What torch's class does to a module by `_MixedPrecision`: cast its buffers, and say on each parameter what it has.

    Its parameters have `_fp_param`, the parameter itself, and `_mp_param`, here without memory: the casts that forward
    computes with belong to the graph.
    """
    if not isinstance(config, _MixedPrecision):
        return
    if config.buffer_dtype is not None:
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(config.buffer_dtype)
    for name, parameter in module.named_parameters():
        if name not in ignored:
            low = config.param_dtype or parameter.dtype
            parameter._mp_param = torch.empty(0, dtype=low, device=parameter.device)  # type: ignore[attr-defined]
            parameter._fp_param = parameter.detach()  # type: ignore[attr-defined]
