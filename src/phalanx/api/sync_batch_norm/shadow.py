"""Taking part in the normalisation of others, with no samples, for a rank that has run out of data."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.api.sync_batch_norm import journal
from phalanx.api.sync_batch_norm.channel import channel_of
from phalanx.api.sync_batch_norm.header import Header
from phalanx.api.sync_batch_norm.layer import SyncBatchNorm


class Shadow:
    """Repeats the collectives that this rank's last step with the module ran, with empty batches.

    Made before the loop it watches: every call of the module begins a step. `step` is then called once for each step of
    the others, at the place of its forward and backward. A rank that ran no step goes by the order in which the layers
    are registered. Whether the others run backward is known from their forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
        self._forwards: list[SyncBatchNorm] = []
        self._backwards: list[SyncBatchNorm] = []
        self._reading = journal.Reading(self._note)
        self._hook = module.register_forward_pre_hook(self._begin)

    def close(self) -> None:
        """Stop watching."""
        self._reading.close()
        self._hook.remove()

    def step(self) -> None:
        """Be there for one step of the others. Running estimates follow, as they would for an empty batch."""
        reduced = {}
        for layer in self._forwards or [layer for layer in self._layers if layer.training]:
            reduced[layer] = self._forward(layer)
        for layer in self._backwards or reversed(self._forwards or self._layers):
            if reduced.get(layer):
                self._backward(layer)

    def _forward(self, layer: SyncBatchNorm) -> bool:
        group = layer._group_to_synchronize()
        if group is None:
            return False
        wire = layer._wire(torch.empty(0))
        channel = channel_of(group, wire.device)
        layer._index_on(channel, wire)
        gathered = channel.gather(Header(0, shadow=True), None, None, wire)
        layer._enter_stats(gathered)
        return gathered.reduces_in_backward

    def _backward(self, layer: SyncBatchNorm) -> None:
        group = layer._group_to_synchronize()
        if group is not None:
            wire = layer._wire(torch.empty(0))
            channel = channel_of(group, wire.device)
            sums = torch.zeros(2, layer.num_features, dtype=wire.dtype, device=wire.device)
            channel.reduce(sums, layer._index_on(channel, wire))

    def _begin(self, *_: object) -> None:
        self._forwards, self._backwards = [], []

    def _note(self, direction: journal.Direction, layer: nn.Module) -> None:
        if any(layer is mine for mine in self._layers) and isinstance(layer, SyncBatchNorm):
            (self._forwards if direction == "forward" else self._backwards).append(layer)
