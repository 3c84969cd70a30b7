"""Taking part in the normalisation of others, with no samples, for a rank that has run out of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from phalanx.api.sync_batch_norm import journal
from phalanx.api.sync_batch_norm.channel import channel_of
from phalanx.api.sync_batch_norm.header import Header
from phalanx.api.sync_batch_norm.layer import SyncBatchNorm


class Shadow:
    """Repeats the collectives that this rank's last step with the module ran, with empty batches.

    Made before the loop it watches: every call of the module begins a step. `step` is then entered once for each step of
    the others. A rank that ran no step goes by the order in which the layers
    are registered. Whether the others run backward is known from their forward.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
        self._forwards: list[SyncBatchNorm] = []
        self._backwards: list[SyncBatchNorm] = []
        self._unsubscribe = journal.subscribe(self._note)
        self._hook = module.register_forward_pre_hook(self._begin)

    def close(self) -> None:
        """Stop watching."""
        self._unsubscribe()
        self._hook.remove()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be there for one step of the others; the block runs what else this rank shares with them (`px.synchronize`).

        Backward's part is under way while the block runs, and done when it ends: the others' backward may wait for
        either first. Running estimates follow, as they would for an empty batch.
        """
        reduced = {}
        for layer in self._forwards or [layer for layer in self._layers if layer.training]:
            reduced[layer] = self._forward(layer)
        order = self._backwards or list(reversed(self._forwards or self._layers))
        started = [self._backward(layer) for layer in order if reduced.get(layer)]
        yield
        for finish in started:
            finish()

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

    def _backward(self, layer: SyncBatchNorm) -> Callable[[], None]:
        group = layer._group_to_synchronize()
        assert group is not None
        wire = layer._wire(torch.empty(0))
        channel = channel_of(group, wire.device)
        sums = torch.zeros(2, layer.num_features, dtype=wire.dtype, device=wire.device)
        return channel.start_reduce(sums, layer._index_on(channel, wire))

    def _begin(self, *_: object) -> None:
        self._forwards, self._backwards = [], []

    def _note(self, direction: journal.Direction, layer: nn.Module) -> None:
        if any(layer is mine for mine in self._layers) and isinstance(layer, SyncBatchNorm):
            (self._forwards if direction == "forward" else self._backwards).append(layer)
