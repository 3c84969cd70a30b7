"""That all ranks hold the same model: the first difference, by name and with both sides, or nothing.

Without this a difference shows as a hang, a crash inside a collective, or wrong numbers. Ranks compare digests first, so
that agreement costs a few bytes each; only when they differ does anyone send more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.comm.group import Group
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.reducer.spread import spread_of

# How long the others are waited for: as long as the group's time-out says, within these. One rank may load a checkpoint
# before it comes; one that died or failed is noticed at once.
PATIENCE_S = (30.0, 600.0)


@dataclass(frozen=True)
class TensorEntry:
    """What ranks must agree on for one parameter or buffer."""

    name: str
    role: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    trained: bool
    spread: str = ""
    """For a tensor of which the ranks hold parts: how. Shape and strides are then those of the part."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, role: str) -> TensorEntry:
        spread = spread_of(tensor)
        part = tensor if spread is None else spread.part(tensor)
        layout = tuple(part.stride()) if part.layout is torch.strided else ()
        how = "" if spread is None else spread.described(tensor)
        return cls(name, role, tuple(part.shape), layout, str(part.dtype), tensor.requires_grad, how)

    def shown(self) -> str:
        trained = "" if self.trained or self.role == "buffer" else ", frozen"
        spread = f", part of a {self.spread}" if self.spread else ""
        return (
            f"{self.name} ({self.role} of shape {list(self.shape)}, {self.dtype}, strides {list(self.stride)}"
            f"{trained}{spread})"
        )


def first_difference(mine: Sequence[TensorEntry], theirs: Sequence[TensorEntry]) -> str | None:
    """What to tell the user, in terms of "here" and "there"; None where both lists are equal."""
    if len(mine) != len(theirs):
        count = f"{len(mine)} tensors here, {len(theirs)} there; "
    else:
        count = ""
    for place, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        if here != there:
            return f"{count}the first that differs is number {place}: here {here.shown()}, there {there.shown()}"
    if len(mine) > len(theirs):
        return f"{count}the first that is only here is {mine[len(theirs)].shown()}"
    if len(mine) < len(theirs):
        return f"{count}the first that is only there is {theirs[len(mine)].shown()}"
    return None


def verify_same(
    group: Group,
    entries: Sequence[TensorEntry],
    *,
    options: Mapping[str, object] | None = None,
    problem: str | None = None,
    doing: str = "replicate its model",
    advice: str = "Build the same model on every rank, in the same order, before it is replicated",
    timeout_s: float | None = None,
) -> None:
    """Raise on every rank where the ranks' entries differ, or where some rank says it has a problem of its own.

    Collective. `problem` is a local error that would otherwise leave the other ranks waiting: they raise with its text,
    and the caller raises its own error after this returns.
    """
    least, most = PATIENCE_S
    within_s = min(max(group.timeout_s, least), most) if timeout_s is None else timeout_s
    mine = dict(options or {})
    listed = json.dumps({"options": mine, "entries": [vars(entry) for entry in entries]}).encode()
    digest = hashlib.sha256(listed).hexdigest()
    said = group.exchange("model", json.dumps({"digest": digest, "problem": problem}).encode(), timeout_s=within_s)
    everyone = [json.loads(part) for part in said]
    for rank, theirs in enumerate(everyone):
        if theirs["problem"] is not None and rank != group.rank and problem is None:
            raise PeerFailedError(
                f"rank {rank} could not {doing}: {theirs['problem']}", failed_ranks=(rank,), rank=group.rank
            )
    if problem is not None:
        return
    if all(theirs["digest"] == digest for theirs in everyone):
        return
    lists = group.exchange("model entries", listed, timeout_s=within_s)
    # Every rank compares with rank 0, and rank 0 with the first that differs from it, so that all name the same pair.
    other = 0
    if digest == everyone[0]["digest"]:
        other = next(rank for rank, theirs in enumerate(everyone) if theirs["digest"] != digest)
    there = json.loads(lists[other])
    theirs_listed = [
        TensorEntry(**{**entry, "shape": tuple(entry["shape"]), "stride": tuple(entry["stride"])})
        for entry in there["entries"]
    ]
    difference = first_difference(entries, theirs_listed)
    different = [name for name, value in mine.items() if there["options"].get(name) != value]
    if difference is None and different:  # some follow from the model: that comes first
        name = different[0]
        raise MismatchError(
            f"rank {group.rank} (here) and rank {other} (there) were given different options: {name} is here "
            f"{mine[name]!r}, there {there['options'].get(name)!r}. Give the same on every rank",
            rank=group.rank,
            group=group.name,
        )
    raise MismatchError(
        f"rank {group.rank} (here) and rank {other} (there) hold different models: {difference}. {advice}",
        rank=group.rank,
        group=group.name,
    )
