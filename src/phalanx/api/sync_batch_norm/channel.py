"""The way that statistics take between ranks: one all_gather in forward, one all_reduce in backward."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.sync_batch_norm.header import Grads, Header, first_difference
from phalanx.comm.c10d import C10dGroup, group_of, own_group
from phalanx.errors import CollectiveTimeoutError, MismatchError, PeerFailedError

# How long ranks wait for each other where a layer is used for the first time; the first batch may be slow to come.
FIRST_USE_TIMEOUT_S = 300.0


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
            mine[:lanes] = torch.tensor(header.encode(), dtype=like.dtype)
        if first is not None and second is not None:
            mine[lanes : lanes + size] = first
            mine[lanes + size :] = second
        self._wait(group.all_gather(list(everyone.unbind(0)), mine), "forward", header.layer)
        if capturing:  # a graph cannot look at what was gathered: all ranks must have as many samples as this one
            headers = [header] * group.size
        else:
            headers = [Header.decode(row) for row in everyone[:, :lanes].tolist()]
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


def _described(layer: dict[str, Any]) -> str:
    return f"{layer['num_features']} channels (statistics in {layer['wire']})"
