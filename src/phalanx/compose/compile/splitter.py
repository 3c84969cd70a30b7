"""Splits a captured graph where buckets end, by torch's own splitter, told which parameters count and how much fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends import distributed as lookup
from torch._dynamo.backends.distributed import Bucket, DDPOptimizer

from phalanx.api import engines
from phalanx.api.ddp import DistributedDataParallel
from phalanx.compose.compile.active import StandIn

_TorchDDP = torch.nn.parallel.DistributedDataParallel


class BucketSplitter(DDPOptimizer):
    """Made by torch.compile for a frame that it is about to capture, called with each graph that comes of it.

    For a module of torch's own class it is torch's. Otherwise it counts the parameters that are averaged, each where
    forward uses it first: that is when backward has its gradient complete. A graph without any is left whole, and so is
    one that no backward follows.
    """

    def __init__(self, bucket_bytes_cap: int, backend_compile_fn: Any, first_bucket_cap: int | None = None) -> None:
        active = _TorchDDP._active_ddp_module
        self._is_ours = isinstance(active, StandIn | DistributedDataParallel)
        if self._is_ours:
            first_bucket_cap = min(bucket_bytes_cap, int(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES))
        super().__init__(bucket_bytes_cap, backend_compile_fn, first_bucket_cap)
        self._completed_at: dict[fx.Node, list[tuple[torch.nn.Parameter, str]]] = {}
        self._counted: set[int] = set()

    def compile_fn(self, gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor], **options: Any) -> Any:
        if not self._is_ours:
            return super().compile_fn(gm, list(example_inputs), **options)
        if self._read(gm, example_inputs):
            return super().compile_fn(gm, list(example_inputs), **options)
        return self.backend_compile_fn(gm, list(example_inputs), **options)

    def _read(self, gm: fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> bool:
        """Whether backward of this graph computes gradients that are averaged; and if so, which and in which portions."""
        if not torch.is_grad_enabled() or torch._dynamo.compiled_autograd.in_compiled_autograd_region:
            return False
        placeholders = gm.graph.find_nodes(op="placeholder")
        inputs = {
            node: tensor
            for node, tensor in zip(placeholders, example_inputs, strict=True)
            if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
        }
        held = [parameter for parameter in gm.parameters() if parameter.requires_grad]
        owners = engines.find([*inputs.values(), *held])
        if not owners:
            return False
        policies = [engine.options.policy for engine in owners.values()]
        self.bucket_bytes_cap = min(policy.cap(1) for policy in policies)
        self.first_bucket_cap = min(self.bucket_bytes_cap, *(policy.cap(0) for policy in policies))
        self._counted = {id(parameter) for parameter in held if id(parameter) in owners}
        place = {node: number for number, node in enumerate(gm.graph.nodes)}
        self._completed_at.clear()
        for node, parameter in inputs.items():
            if id(parameter) in owners and node.users:
                first = min(node.users, key=place.__getitem__)
                self._completed_at.setdefault(first, []).append((parameter, str(node.target)))
        return True

    def _ignore_parameter(self, parameter: torch.nn.Parameter) -> bool:
        return id(parameter) not in self._counted if self._is_ours else super()._ignore_parameter(parameter)

    def add_param_args(self, bucket: Bucket, node: fx.Node) -> None:
        if not self._is_ours:
            super().add_param_args(bucket, node)
        for parameter, name in self._completed_at.get(node, ()):
            self.add_param(bucket, parameter, name)


def install() -> None:
    """Be what torch.compile finds when it looks for its splitter, which it does for each frame."""
    lookup.DDPOptimizer = BucketSplitter  # type: ignore[misc]
