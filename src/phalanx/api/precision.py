"""`Precision`: in which dtypes a replicated module computes, keeps its buffers and sums its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,  # batch and instance normalisation, lazy and synchronised ones too
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
"""torch's normalisation layers, for `keep_full`."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How a replicated module mixes precisions. Parameters, optimizer state and `state_dict` stay as they are.

    While the module runs, its parameters are casts of the real ones; autograd casts gradients back, so `.grad` has the
    parameter's own dtype, accumulates in it, and an optimizer sees nothing of all this. Every rank gives an equal policy.
    What is None is left alone; only floating-point tensors are ever cast.
    """

    param_dtype: torch.dtype | None = None
    """Parameters are cast to this while the module's forward runs, and again while checkpointed parts are recomputed."""
    reduce_dtype: torch.dtype | None = None
    """Gradients are averaged in this dtype, on the way only; None: in that of the parameter."""
    buffer_dtype: torch.dtype | None = None
    """Buffers are cast to this while forward runs; what forward writes to them is kept in their own dtype."""
    output_dtype: torch.dtype | None = None
    """What the module's forward returns is cast to this, for a loss in single precision."""
    cast_inputs: bool = True
    """Whether forward's arguments, however nested, are cast to `param_dtype`."""
    keep_full: tuple[type[nn.Module] | str, ...] = ()
    """Layers left in full precision, with all that is in them: types, names of submodules, or names of parameters.

    Such a layer gets its inputs in the dtype of its parameters, and what it returns is cast to `param_dtype`.
    """

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            check_dtype(field, getattr(self, field))
        if not isinstance(self.cast_inputs, bool):
            raise TypeError(f"cast_inputs must be True or False, got {self.cast_inputs!r}")
        kept = self.keep_full
        if isinstance(kept, str | type) or not isinstance(kept, Iterable):
            kept = (kept,)
        kept = tuple(kept)
        for layer in kept:
            if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, nn.Module)):
                raise TypeError(
                    "keep_full takes module types (nn.LayerNorm), names of submodules ('blocks.0.norm') and names of "
                    f"parameters, got {layer!r}"
                )
        if kept and self.param_dtype is None and self.buffer_dtype is None:
            raise ValueError("keep_full keeps layers from param_dtype and buffer_dtype: give one of them too")
        object.__setattr__(self, "keep_full", kept)

    def problem_with(self, module: nn.Module) -> Exception | None:
        """Why this policy does not fit a module, as the error to raise."""
        names = {name for name, _ in module.named_modules(remove_duplicate=False) if name}
        names |= {name for name, _ in module.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        unknown = [layer for layer in self.keep_full if isinstance(layer, str) and layer not in names]
        if unknown:
            return ValueError(f"keep_full names what the module does not have: {', '.join(unknown)}")
        if self.param_dtype is None and self.buffer_dtype is None:
            return None
        for name, submodule in module.named_modules():
            if isinstance(submodule, torch.jit.ScriptModule) and not self._keeps_all_of(name, submodule):
                return ValueError(
                    f"{name or 'the module'} is compiled by torch.jit, and its parameters cannot be cast while it runs: "
                    "replicate the Python module, or name it in keep_full"
                )
        return None

    def _keeps_all_of(self, name: str, submodule: nn.Module) -> bool:
        types = tuple(layer for layer in self.keep_full if isinstance(layer, type))
        inside = any(
            isinstance(layer, str) and (name == layer or name.startswith(f"{layer}.")) for layer in self.keep_full
        )
        return inside or isinstance(submodule, types)


def check_dtype(field: str, dtype: object) -> None:
    """Raise if this is no dtype to compute and to add up in."""
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{field} must be a torch.dtype such as torch.bfloat16, or None; got {dtype!r}")
    if dtype not in _DTYPES:
        shown = ", ".join(str(known) for known in _DTYPES)
        raise ValueError(f"{field} must be one of {shown}; got {dtype}")
