"""The way that statistics take between ranks: one all_gather in forward, one all_reduce in backward."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.sync_batch_norm.header import Grads, Header, first_difference
from phalanx.api.sync_batch_norm.words import LISTENING, UNKNOWN_LAYER, Direction, Word
from phalanx.comm.c10d import C10dGroup, group_of
from phalanx.comm.process_groups import own_group
from phalanx.errors import CollectiveTimeoutError, MismatchError, PeerFailedError

# How long ranks wait for each other where a layer is used for the first time; the first batch may be slow to come.
FIRST_USE_TIMEOUT_S = 300.0


class Told(Protocol):
    """A loop over uneven data, which knows where ranks without any wait."""

    def tell(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Gathered:
    """Every rank's statistics: a row per rank, with those of ranks that have samples only."""

    first: torch.Tensor
    second: torch.Tensor
    counts: tuple[int, ...]
    reduces_in_backward: bool
    """Whether any rank's input needs a gradient: then every rank takes part in the backward's reduction."""

    @property
    def total(self) -> int:
        return sum(self.counts)


class Channel:
    """Ranks that normalise together, and the layers that they do it for.

    On Gloo and on shared memory it has a group of its own: a gradient bucket that one rank launches before a layer's
    backward and another after it cannot be taken for the layer's sums, and a rank that has run out of data can shadow
    the layers without knowing when the others launch buckets. NCCL keeps the user's group: another communicator costs
    memory, and two that run at once must not.
    """

    def __init__(self, parent: dist.ProcessGroup, own: dist.ProcessGroup | None) -> None:
        self._parent = weakref.ref(parent)  # the table of channels has the parent as its key: it must not be kept alive
        self._own = None if own is None else group_of(own)
        self._indices: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._num_layers = 0
        self._num_calls = 0
        self._leads: weakref.WeakSet[Told] = weakref.WeakSet()  # weakly: a loop may be left without a word

    @property
    def has_own_group(self) -> bool:
        return self._own is not None

    @property
    def is_led(self) -> bool:
        """Whether ranks say, before each collective, what it is: some rank listens, as it has no data of its own."""
        return bool(self._leads)

    @property
    def group(self) -> C10dGroup:
        if self._own is not None:
            return self._own
        parent = self._parent()
        assert parent is not None, "a layer is used after its process group is gone"
        return group_of(parent)

    def index_of(self, layer: nn.Module, *, num_features: int, wire: torch.dtype) -> int:
        """The layer's number, by first use, the same on all ranks. The first use compares what the ranks will send.

        It goes through the store: a tensor of another size than expected ends the process in Gloo.
        """
        index = self._indices.get(layer)
        if index is None and self.is_led:
            self.say(UNKNOWN_LAYER)
            raise MismatchError(
                "a SyncBatchNorm layer is used for the first time while a rank has no data left, and that rank does not "
                "know it: layers must be part of the joined modules when the loop begins",
                rank=self.group.rank,
                group=self.group.name,
            )
        if index is None:
            mine = {"num_features": num_features, "wire": str(wire)}
            parts = self.group.exchange(
                "the first use of a SyncBatchNorm layer", json.dumps(mine).encode(), timeout_s=FIRST_USE_TIMEOUT_S
            )
            index = self._num_layers
            for rank, part in enumerate(parts):
                theirs = json.loads(part)
                if theirs != json.loads(parts[0]):
                    raise MismatchError(
                        "ranks are in different SyncBatchNorm layers: rank 0's has "
                        f"{_described(json.loads(parts[0]))} and rank {rank}'s {_described(theirs)}",
                        rank=self.group.rank,
                        group=self.group.name,
                    )
            self._indices[layer] = index
            self._num_layers += 1
        return index

    def adopt(self, layer: nn.Module) -> None:
        """Give the layer its number before its first use. All ranks call this alike, and have compared their layers."""
        if layer not in self._indices:
            self._indices[layer] = self._num_layers
            self._num_layers += 1

    def layer(self, index: int) -> nn.Module | None:
        return next((layer for layer, known in self._indices.items() if known == index), None)

    # -- telling a rank that has no data what is to come; see `shadow` ---------------------------------------------

    def lead(self, loop: Told) -> None:
        """Announce for as long as the loop lives. All ranks that have data begin between the same two collectives."""
        self._leads.add(loop)

    def stop_leading(self) -> None:
        self._leads.clear()

    def announce(self, direction: Direction, layer: int, like: Wire) -> None:
        """Say what the next collective is, where ranks listen. Raises, on every rank, where ranks are at different ones."""
        if self.is_led:
            self.say(Word(direction, layer, wide=like.dtype == torch.float64).encode())

    def say(self, word: int) -> int:
        """Every rank says one number; returns the one that those who have data say."""
        work, heard = self.start_saying(word)
        work.wait()
        return self.understood(heard)

    def start_saying(self, word: int) -> tuple[Any, list[torch.Tensor]]:
        heard = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.group.size)]
        return self.group.all_gather(heard, torch.tensor([word], device="cpu")), heard

    def understood(self, heard: list[torch.Tensor]) -> int:
        words = [int(one.item()) for one in heard]
        said = {word for word in words if word != LISTENING}
        if len(said) > 1:
            shown = ", ".join(f"rank {rank} {Word.shown(word)}" for rank, word in enumerate(words))
            raise MismatchError(f"SyncBatchNorm: {shown}", rank=self.group.rank, group=self.group.name)
        return said.pop() if said else LISTENING

    def fail(self, error: Exception) -> None:
        """This rank raises in a layer. Ranks that have no data wait for it elsewhere, too: have them told."""
        for loop in list(self._leads):
            loop.tell(f"{type(error).__name__}: {error}")
        self.stop_leading()
        forget_channel(self)  # ranks that listened give theirs up

    # -- the collectives themselves --------------------------------------------------------------------------------

    def gather(self, header: Header, first: torch.Tensor | None, second: torch.Tensor | None, like: Wire) -> Gathered:
        """Every rank's two vectors and header. Raises, on every rank, where a rank failed or ranks disagree."""
        group = self.group
        self._num_calls += 1
        lanes, size = Header.LANES, like.num_features
        everyone = torch.empty((group.size, lanes + 2 * size), dtype=like.dtype, device=like.device)
        mine = torch.zeros_like(everyone[0])
        capturing = like.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:  # a copy from the host cannot be recorded
            for lane, value in enumerate(header.encode()):
                mine[lane].fill_(value)
        else:
            mine[:lanes] = torch.tensor(header.encode(), dtype=like.dtype, device="cpu")
        if first is not None and second is not None:
            mine[lanes : lanes + size] = first
            mine[lanes + size :] = second
        self._wait(group.all_gather(list(everyone.unbind(0)), mine), "forward", header.layer)
        if capturing:  # a graph cannot look at what was gathered: all ranks must have as many samples as this one
            headers = [header] * group.size
        else:
            headers = [Header.decode(row) for row in group.read(everyone[:, :lanes])]
            self._check(headers)
        present = [rank for rank, said in enumerate(headers) if said.count]
        rows = everyone if len(present) == group.size else everyone[present]
        return Gathered(
            rows[:, lanes : lanes + size],
            rows[:, lanes + size :],
            tuple(headers[rank].count for rank in present),
            any(said.grads & Grads.INPUT for said in headers),
        )

    def start_reduce(self, sums: torch.Tensor, layer: int) -> Callable[[], None]:
        """Add up a backward's sums over all ranks, in place. What is returned waits for it."""
        work = self.group.all_reduce(sums)
        return lambda: self._wait(work, "backward", layer)

    def report(self, problem: Exception, layer: int, like: Wire) -> None:
        """Tell the others, who are in this layer too, why this rank will not go on. The caller raises `problem`."""
        self.group.post_failure(self._topic(self._num_calls + 1), f"{type(problem).__name__}: {problem}")
        try:
            self.announce("forward", layer, like)
            self.gather(Header(0, layer, failed=True), None, None, like)
        except (MismatchError, PeerFailedError):
            return  # what the others have to say does not matter: this rank has a problem of its own to raise

    def _check(self, headers: list[Header]) -> None:
        group = self.group
        failed = [rank for rank, said in enumerate(headers) if said.failed and rank != group.rank]
        if failed:
            reason = group.failure_of(failed[0], self._topic(self._num_calls))
            raise PeerFailedError(
                f"rank {failed[0]} failed in a SyncBatchNorm layer: {reason or 'it did not say why'}",
                failed_ranks=failed,
                rank=group.rank,
                group=group.name,
            )
        difference = first_difference(headers)
        if difference is not None:
            raise MismatchError(f"SyncBatchNorm: {difference}", rank=group.rank, group=group.name)

    def _wait(self, work: Any, where: str, layer: int) -> None:
        try:
            work.wait()
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"not every rank came to the {where} pass of SyncBatchNorm layer number {layer + 1}. Every rank must call "
                "it equally often, in training mode (a rank whose model is in eval mode does not take part), and run "
                f"backward if another does: {error.message}",
                rank=self.group.rank,
                group=self.group.name,
            ) from error

    @staticmethod
    def _topic(call: int) -> str:
        return f"sync batch norm call {call}"


@dataclass(frozen=True)
class Wire:
    """In what form a layer's statistics travel: all ranks' must be alike."""

    num_features: int
    dtype: torch.dtype
    device: torch.device


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, Channel]] = weakref.WeakKeyDictionary()


def channel_of(process_group: dist.ProcessGroup, device: torch.device) -> Channel:
    """The channel of a process group. The first call is collective: ranks meet, and make a group for it."""
    has_own = device.type == "cpu" or dist.get_backend(process_group) == "gloo"
    found = _channels.setdefault(process_group, {})
    if has_own not in found:
        own = None
        if has_own:
            # Making a group waits for all ranks, and names none that does not come; this does.
            group_of(process_group).exchange("the first SyncBatchNorm layer", b"", timeout_s=FIRST_USE_TIMEOUT_S)
            own = own_group(process_group)
        found[has_own] = Channel(process_group, own)
    return found[has_own]


def forget_channel(channel: Channel) -> None:
    """Make a new one when the group is used next: on every rank, after this one broke off."""
    for found in list(_channels.values()):
        for has_own in [key for key, known in found.items() if known is channel]:
            del found[has_own]


def _described(layer: dict[str, Any]) -> str:
    return f"{layer['num_features']} channels (statistics in {layer['wire']})"
