"""`SyncBatchNorm`: torch's layer, on the CPU too, and two ways to put it into a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.api.sync_batch_norm.channel import Channel, Gathered, Wire, channel_of
from phalanx.api.sync_batch_norm.function import Call, SyncedNorm
from phalanx.api.sync_batch_norm.header import DTYPES, Grads
from phalanx.api.sync_batch_norm.kernels import RunningStats, kernels_for

ModuleT = TypeVar("ModuleT", bound=nn.Module)
TorchSyncBatchNorm = torch.nn.modules.batchnorm.SyncBatchNorm


class SyncBatchNorm(TorchSyncBatchNorm):
    """Batch normalisation over the samples of all ranks: what one process computes on the concatenated batch.

    Arguments, attributes and state are those of `torch.nn.SyncBatchNorm`, whose subclass it is. It works on the CPU as
    well. In training mode a forward pass is collective, and so is its backward: every rank of the group calls the layer
    equally often, in the same order of layers, with inputs of the same dtype and number of dimensions. Batches may
    differ in size, and a rank's may be empty. In eval mode nothing is communicated.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype)
        if not bias:  # older torch has no such argument
            self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        group = self._group_to_synchronize()
        if group is None:
            self._check_input_dim(input)
            self._check_non_zero_input_channels(input)
            return self._local_forward(input)
        # Under torch.compile the collective runs outside of the graph. Only then: `disable` loads the compiler, which takes
        # seconds, and with it modules that keep the default process group for good.
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        if "torch._dynamo" in sys.modules:
            return _outside_of_graphs()(self, input, group)
        return self._synced_forward(input, group)

    def _group_to_synchronize(self) -> dist.ProcessGroup | None:
        return self._own_ranks() if self.training else None

    def _own_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that this layer normalises over in training; None where that is this one alone."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        # What new_group gives to a rank outside is not a process group; such a rank normalises alone.
        return group if isinstance(group, dist.ProcessGroup) and group.size() > 1 else None

    def _local_forward(self, input: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        running = self._running_stats() if self.training else None
        if running is not None:
            factor = running.next_factor()
        keeps = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if keeps else None,
            self.running_var if keeps else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )

    def _synced_forward(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        wire = self._wire(input)
        channel = channel_of(group, wire.device)
        if not channel.is_led:
            return self._normalized(input, channel, wire)
        try:
            return self._normalized(input, channel, wire)
        except Exception as error:
            channel.fail(error)
            raise

    def _normalized(self, input: Tensor, channel: Channel, wire: Wire) -> Tensor:
        index = self._index_on(channel, wire)
        problem = self._problem_with(input)
        if problem is not None:
            channel.report(problem, index, wire)
            raise problem
        grads = Grads.NONE
        if torch.is_grad_enabled():
            grads |= Grads.INPUT | Grads.SOME if input.requires_grad else Grads.NONE
            needed = [p for p in (self.weight, self.bias) if p is not None and p.requires_grad]
            grads |= Grads.SOME if needed else Grads.NONE
        call = Call(channel, index, wire, self._running_stats(), self.eps)
        result: Tensor = SyncedNorm.apply(input, self.weight, self.bias, call, grads)
        return result

    def _enter_stats(self, gathered: Gathered) -> None:
        """The running estimates of a rank that had no part in a forward pass but its collective."""
        if gathered.total > 1:
            kernels = kernels_for(gathered.first.device)
            kernels.combine(gathered.first, gathered.second, gathered.counts, self._running_stats(), self.eps)

    def _running_stats(self) -> RunningStats | None:
        if not self.track_running_stats:
            return None
        return RunningStats(self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)

    def _state(self) -> list[Tensor]:
        held = (self.weight, self.bias, self.running_mean, self.running_var)
        return [tensor for tensor in held if tensor is not None]

    def _wire(self, like: Tensor) -> Wire:
        """By the layer, not by the input: a rank whose input is wrong must still send what the others expect."""
        state = self._state()
        device, dtype = (state[0].device, state[0].dtype) if state else (like.device, like.dtype)
        # On the CPU always in float64: it costs a few bytes, and nothing is lost where ranks' means are far apart.
        wide = device.type == "cpu" or dtype == torch.float64
        return Wire(self.num_features, torch.float64 if wide else torch.float32, device)

    def _index_on(self, channel: Channel, wire: Wire) -> int:
        return channel.index_of(self, num_features=self.num_features, wire=wire.dtype)

    def _problem_with(self, input: Tensor) -> Exception | None:
        """What is wrong with this rank's input, as the exception to raise; the others are told."""
        if input.dim() < 2:
            return ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features or self.num_features == 0:
            return ValueError(
                f"expected an input of {self.num_features} channels, and at least one, in dimension 1; "
                f"got shape {list(input.shape)}"
            )
        if input.dtype not in DTYPES:
            return ValueError(f"expected a floating-point input; got {input.dtype}")
        for tensor in self._state():
            if tensor.device != input.device:
                return ValueError(
                    f"expected an input on {tensor.device}, where the layer is; got one on {input.device}"
                )
            is_half = input.dtype in (torch.float16, torch.bfloat16)
            if tensor.dtype != input.dtype and not (is_half and tensor.dtype == torch.float32):
                return ValueError(
                    f"expected an input of {tensor.dtype}, as the layer is, or of a half type for a float32 layer; "
                    f"got {input.dtype}"
                )
        return None

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any | None = None) -> nn.Module:
        """Put a new layer of this class in the place of every BatchNorm in the module, with its parameters and buffers.

        Local: no rank waits. Returns the module, or the new layer where the module itself is a BatchNorm. A layer that
        is used in two places stays one layer.
        """
        return cls._converted(module, process_group, {})

    @classmethod
    def _converted(cls, module: nn.Module, process_group: Any | None, done: dict[nn.Module, nn.Module]) -> nn.Module:
        if module in done:
            return done[module]
        done[module] = result = cls._like(module, process_group) if isinstance(module, _BatchNorm) else module
        for name, child in list(module._modules.items()):
            if child is not None:
                result.add_module(name, cls._converted(child, process_group, done))
        return result

    @classmethod
    def _like(cls, layer: _BatchNorm, process_group: Any | None) -> SyncBatchNorm:
        made = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_group,
            device="meta",  # what it holds is replaced at once
        )
        for name, parameter in layer._parameters.items():
            made.register_parameter(name, parameter)
        for name, buffer in layer._buffers.items():
            made.register_buffer(name, buffer)
        made.training = layer.training
        if hasattr(layer, "qconfig"):
            made.qconfig = layer.qconfig
        return made


_disabled: list[Callable[[SyncBatchNorm, Tensor, dist.ProcessGroup], Tensor]] = []


def _outside_of_graphs() -> Callable[[SyncBatchNorm, Tensor, dist.ProcessGroup], Tensor]:
    if not _disabled:
        _disabled.append(torch.compiler.disable(SyncBatchNorm._synced_forward))
    return _disabled[0]


def synchronize_batch_norm(module: ModuleT, *, process_group: dist.ProcessGroup | None = None) -> ModuleT:
    """Make every BatchNorm in the module normalise over all ranks from now on, in place. Returns the module itself.

    Local: no rank waits. The layers stay the objects that they were, with their parameters, hooks and places, so it may
    come before or after `replicate`, wrapping in a DistributedDataParallel, or making an optimizer.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"synchronize_batch_norm takes a torch.nn.Module, got {type(module).__name__}")
    found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in found:
        if type(layer).forward not in (_BatchNorm.forward, TorchSyncBatchNorm.forward, SyncBatchNorm.forward):
            raise ValueError(
                f"{name or 'the module'} is a {type(layer).__name__} with a forward of its own, which would be lost: "
                "use nn.BatchNorm1d, 2d or 3d there, or convert the other parts of the model one by one"
            )
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise ValueError(f"{name or 'the module'} is lazy: run one forward pass with a sample batch first")
    for _, layer in found:
        if not isinstance(layer, SyncBatchNorm):
            layer.__class__ = SyncBatchNorm
        layer.process_group = process_group  # type: ignore[assignment]
    return module
