"""Accelerate on Phalanx, for those who prefer to say it (`phalanx.swap_ddp` needs no word in the script).

    from phalanx.compose.accelerate import PhalanxPlugin

    accelerator = PhalanxPlugin(backend="phalanx").accelerator(gradient_accumulation_steps=4)

Accelerate looks its wrapper up in torch and takes handlers of its own classes only, so the plugin makes the accelerator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from phalanx.api.world import init
from phalanx.compose.swap import swap_ddp

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, KwargsHandler
except ImportError as error:
    raise ImportError(
        "phalanx.compose.accelerate needs Accelerate 1: install it (pip install accelerate), or use phalanx.swap_ddp()"
    ) from error

_DDP_OPTIONS = tuple(option.name for option in dataclasses.fields(DistributedDataParallelKwargs))


class PhalanxAccelerator(Accelerator):
    """An `Accelerator` that wraps the models it prepares in Phalanx's DistributedDataParallel. Nothing else changes."""

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        with swap_ddp():
            prepared: nn.Module = super().prepare_model(model, *args, **options)
        return prepared


@dataclass(frozen=True)
class PhalanxPlugin:
    """How an accelerator is to use Phalanx.

    `backend`: the process group to join before Accelerate makes one, `"phalanx"` for shared memory; `None` leaves it to
    Accelerate. `ddp`: options of DistributedDataParallel, by the names of Accelerate's `DistributedDataParallelKwargs`.
    """

    backend: str | None = None
    ddp: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend is not None and not hasattr(dist.Backend, self.backend.upper()):
            raise ValueError(f"backend must be a backend of torch.distributed or None, got {self.backend!r}")
        if unknown := [name for name in self.ddp if name not in _DDP_OPTIONS]:
            raise ValueError(f"ddp takes the options {', '.join(_DDP_OPTIONS)}; got {', '.join(map(repr, unknown))}")

    def accelerator(self, *, kwargs_handlers: Iterable[KwargsHandler] = (), **options: Any) -> PhalanxAccelerator:
        """An accelerator on Phalanx; takes what `Accelerator` takes. Every rank calls it."""
        handlers = list(kwargs_handlers)
        if self.ddp:
            if any(isinstance(handler, DistributedDataParallelKwargs) for handler in handlers):
                raise ValueError("options of DistributedDataParallel are given twice: in ddp= and in kwargs_handlers=")
            handlers.append(DistributedDataParallelKwargs(**self.ddp))
        if self.backend is not None:
            if dist.is_initialized() and str(dist.get_backend()) != self.backend:
                raise ValueError(
                    f"there is a process group of backend {dist.get_backend()!r} already, and the plugin asks for "
                    f"{self.backend!r}: make the plugin's accelerator before anything that makes a group"
                )
            init(backend=self.backend)
        return PhalanxAccelerator(kwargs_handlers=handlers, **options)
