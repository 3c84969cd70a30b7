"""Ranks without data in the normalisation of those that have some: a joined rank takes part with an empty batch.

Which layers the others run, how often and in which order, is theirs to decide (branches, checkpointing, several passes
without a reduction), so they say it: from the first step that some rank has no data for, each collective of a layer is
preceded by one number per rank. A rank without data listens in a thread of its own, since its main thread takes part in
the reduction of gradients meanwhile, and the others' backward may wait for either first. Where all listen, it is over.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.sync_batch_norm.channel import FIRST_USE_TIMEOUT_S, Channel, Wire, channel_of, forget_channel
from phalanx.api.sync_batch_norm.header import Header
from phalanx.api.sync_batch_norm.layer import SyncBatchNorm, TorchSyncBatchNorm
from phalanx.api.sync_batch_norm.words import LISTENING, UNKNOWN_LAYER, Word
from phalanx.comm.c10d import C10dGroup
from phalanx.errors import MismatchError, PhalanxError

LOOK_EVERY_S = 0.5  # how soon a listener that is told to stop does so


def synchronized_layers(modules: Iterable[nn.Module]) -> list[tuple[str, TorchSyncBatchNorm]]:
    """The SyncBatchNorm layers, torch's own too, each once, by name."""
    found: dict[int, tuple[str, TorchSyncBatchNorm]] = {}
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, TorchSyncBatchNorm):
                found.setdefault(id(layer), (name or "the module", layer))
    return list(found.values())


def problem_with(layers: Sequence[tuple[str, TorchSyncBatchNorm]], group: dist.ProcessGroup) -> str | None:
    """Why a rank of `group` without data could not shadow these layers; None where it can."""
    ranks = set(dist.get_process_group_ranks(group))
    for name, layer in layers:
        if not layer.training:
            continue
        if not isinstance(layer, SyncBatchNorm):
            return (
                f"{name} is a SyncBatchNorm of torch's own: its statistics are computed by all ranks in every forward "
                "pass, which a rank without data has none of. Use phalanx.SyncBatchNorm"
            )
        own = layer._own_ranks()
        if own is None:
            continue
        if not set(dist.get_process_group_ranks(own)) <= ranks:
            return f"{name} normalises over ranks that do not take part in this loop"
        device = _wire(layer, torch.empty(0, device="cpu")).device
        if device.type != "cpu" and dist.get_backend(own) != "gloo":
            return (
                f"{name} shares a group of {dist.get_backend(own)} with the gradients: a rank without data cannot know in "
                "which order the others use it. Give the layer a process group of Gloo"
            )
    return None


class Shadowing:
    """One rank's part in the SyncBatchNorm layers of one loop over uneven data. All ranks make theirs alike."""

    def __init__(
        self,
        layers: Sequence[tuple[str, TorchSyncBatchNorm]],
        group: C10dGroup,
        *,
        tell: Callable[[str], None],
        like: torch.Tensor,
        keeps_stats: bool,
    ) -> None:
        """`tell` is told what goes wrong in a layer; `like` stands for inputs of layers without any state.

        `keeps_stats`: the running estimates of a rank without data follow the others'. Not where they are copied anyway.
        """
        self._layers = [layer for _, layer in layers if isinstance(layer, SyncBatchNorm)]
        self._group = group
        self.tell = tell
        self._like = like
        self._keeps_stats = keeps_stats
        self._channels: list[Channel] = []
        self._prepared = False

    def prepare(self) -> None:
        """Compare the layers, and number those that no rank has used yet. Collective, once."""
        if self._prepared:
            return
        self._prepared = True
        for layer in self._layers:
            (_following.add if self._keeps_stats else _following.discard)(layer)
        with _numbering:
            mine = [[layer.num_features, str(_wire(layer, self._like).dtype)] for layer in self._layers]
            said = json.dumps(mine).encode()
            parts = self._group.exchange("the SyncBatchNorm layers of a join", said, timeout_s=FIRST_USE_TIMEOUT_S)
            for rank, part in enumerate(parts):
                if part != parts[0]:
                    raise MismatchError(
                        "ranks have different SyncBatchNorm layers (channels, and how their statistics are sent): rank 0 "
                        f"has {parts[0].decode()}, rank {rank} {part.decode()}",
                        rank=self._group.rank,
                        group=self._group.name,
                    )
            for layer in self._layers:
                own = layer._own_ranks()
                if own is not None:
                    channel = channel_of(own, _wire(layer, self._like).device)
                    channel.adopt(layer)
                    if channel not in self._channels:
                        self._channels.append(channel)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that the layers communicate in."""
        return [channel.group.process_group for channel in self._channels]

    def lead(self) -> None:
        """This rank has data and another has none: say what comes. Local; all ranks with data do so at the same point."""
        for channel in self._channels:
            channel.lead(self)

    def rest(self) -> None:
        """Every rank has data again. Local, at the same point on all ranks."""
        for channel in self._channels:
            channel.stop_leading()

    def listen(self) -> None:
        """This rank has no data from here on. Local."""
        for channel in self._channels:
            listener = _listeners.get(channel)
            if listener is None:
                listener = _listeners[channel] = Listener(channel, self._like.device)
                listener.start()

    def finish(self) -> None:
        """No rank has data any more, or every rank gives up at this point. Collective, where a rank led or listened."""
        for channel in self._channels:
            listener = _listeners.pop(channel, None)
            if listener is None and not channel.is_led:
                continue
            channel.stop_leading()
            if listener is None:
                listener = Listener(channel, self._like.device)
                listener.start()
            listener.join()
            if listener.error is not None:
                raise listener.error

    def break_off(self, reason: str) -> None:
        """This rank leaves by itself. Who waits for it in a layer is told; the next use begins anew."""
        for channel in self._channels:
            listener = _listeners.pop(channel, None)
            if listener is None and not channel.is_led:
                continue
            channel.stop_leading()
            forget_channel(channel)
            channel.group.abort(reason)
            if listener is not None:
                listener.stop()


class Listener:
    """The thread of a rank without data that takes part in what the others announce on one channel."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self.error: Exception | None = None
        self._channel = channel
        self._device = device
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phalanx-sync-batch-norm", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while not self._stopped.is_set() and (word := self._hear()) != LISTENING:
                    self._take_part(word)
        except PhalanxError as error:  # which the others find, too
            self.error = error
        except Exception as error:
            self.error = error
            self._channel.group.abort(f"a rank without data failed in a SyncBatchNorm layer: {error}")

    def _hear(self) -> int:
        work, heard = self._channel.start_saying(LISTENING)
        while not work.ended_within(LOOK_EVERY_S):
            if self._stopped.is_set():
                return LISTENING
        return self._channel.understood(heard)

    def _known(self, number: int) -> nn.Module | None:
        layer = self._channel.layer(number)
        if layer is None:  # one of a module whose loop is being prepared in the main thread
            with _numbering:
                layer = self._channel.layer(number)
        return layer

    def _take_part(self, number: int) -> None:
        layer = None if number == UNKNOWN_LAYER else self._known(Word.decode(number).layer)
        if not isinstance(layer, SyncBatchNorm):
            group = self._channel.group
            reason = f"rank {group.rank} has no data left and does not know a SyncBatchNorm layer that the others use"
            if number != UNKNOWN_LAYER:  # they know it, and wait for this rank
                group.abort(reason)
            raise MismatchError(reason, rank=group.rank, group=group.name)
        word = Word.decode(number)
        device = _wire(layer, torch.empty(0, device=self._device)).device
        wire = Wire(layer.num_features, torch.float64 if word.wide else torch.float32, device)
        if word.direction == "backward":
            sums = torch.zeros(2, layer.num_features, dtype=wire.dtype, device=wire.device)
            self._channel.start_reduce(sums, word.layer)()
            return
        gathered = self._channel.gather(Header(0, shadow=True), None, None, wire)
        if layer in _following:
            layer._enter_stats(gathered)


_listeners: dict[Channel, Listener] = {}
# Layers whose running estimates follow those of the others while this rank has no data.
_following: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Held from before all ranks meet over a loop's layers until they have their numbers here: the others may use one at once.
_numbering = threading.Lock()


def _wire(layer: TorchSyncBatchNorm, like: torch.Tensor) -> Wire:
    assert isinstance(layer, SyncBatchNorm)
    return layer._wire(like)
