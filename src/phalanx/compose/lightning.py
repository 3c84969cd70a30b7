"""Lightning's strategies on Phalanx, for those who prefer to say it (`phalanx.swap_ddp` needs no word in the script).

    from phalanx.compose.lightning import PhalanxStrategy

    trainer = Trainer(strategy=PhalanxStrategy(find_unused_parameters=True), devices=2)

With this module imported, `Trainer(strategy="phalanx")` and `Fabric(strategy="phalanx")` work too.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.ddp import DistributedDataParallel

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
except ImportError as error:
    raise ImportError(
        "phalanx.compose.lightning needs Lightning 2: install it (pip install lightning), or use phalanx.swap_ddp()"
    ) from error

_SET_BY_LIGHTNING = ("self", "module", "device_ids", "output_device", "process_group")


class PhalanxStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` with Phalanx's DistributedDataParallel, for the Trainer.

    Takes what `DDPStrategy` takes; further options are those of DistributedDataParallel, and are checked here, not when
    the ranks have started. The process group is `phalanx` (shared memory on one host, NCCL for CUDA tensors) unless
    `process_group_backend` says otherwise.
    """

    def __init__(self, *args: Any, process_group_backend: str | None = None, **options: Any) -> None:
        _check_options(type(self), DDPStrategy, options)
        super().__init__(*args, process_group_backend=process_group_backend or _default_backend(), **options)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        with _side_stream(device_ids):
            return DistributedDataParallel(module=model, device_ids=device_ids, **self._ddp_kwargs)


class PhalanxFabricStrategy(FabricDDPStrategy):
    """Lightning Fabric's `DDPStrategy` with Phalanx's DistributedDataParallel; else as `PhalanxStrategy`."""

    def __init__(self, *args: Any, process_group_backend: str | None = None, **options: Any) -> None:
        _check_options(type(self), FabricDDPStrategy, options)
        super().__init__(*args, process_group_backend=process_group_backend or _default_backend(), **options)

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        device_ids = self._determine_ddp_device_ids()
        with _side_stream(device_ids):
            return DistributedDataParallel(module=module, device_ids=device_ids, **self._ddp_kwargs)


def _check_options(kind: type, lightnings: type, options: dict[str, Any]) -> None:
    own = [name for name in inspect.signature(lightnings).parameters if name != "kwargs"]
    ddp = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in _SET_BY_LIGHTNING]
    unknown = [name for name in options if name not in own and name not in ddp]
    if unknown:
        raise TypeError(
            f"{kind.__name__} has no option {', '.join(map(repr, unknown))}. Options of the strategy: {', '.join(own)}; "
            f"options of DistributedDataParallel: {', '.join(ddp)}"
        )


def _default_backend() -> str | None:
    """Ours where it is registered; else Lightning chooses."""
    return "phalanx" if "PHALANX" in dist.Backend._plugins else None


def _side_stream(device_ids: list[int] | None) -> AbstractContextManager[Any]:
    """Lightning wraps models on a stream of their own, so that gradients are not accumulated on the default one."""
    return nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream())


for registry, strategy in ((StrategyRegistry, PhalanxStrategy), (FABRIC_REGISTRY, PhalanxFabricStrategy)):
    registry.register("phalanx", strategy, description="DDP on Phalanx", override=True)
    registry.register(
        "phalanx_find_unused_parameters_true",
        strategy,
        description="DDP on Phalanx, with unused parameters",
        override=True,
        find_unused_parameters=True,
    )
