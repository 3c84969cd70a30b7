"""Averaging parameters over a group, in place: few large collectives, after the ranks have found that they agree."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from phalanx.comm.c10d import C10dGroup
from phalanx.comm.coalesced import PIECE_BYTES, pieces
from phalanx.comm.group import Work
from phalanx.errors import MismatchError, PeerFailedError

AGREE_WITHIN_S = 600.0
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""What is averaged: a model's parameters, or an optimizer's parameter groups."""


def average_parameters(params: Parameters, group: C10dGroup, *, setting: str, piece_bytes: int = PIECE_BYTES) -> None:
    """Give every rank the mean of the ranks' values, bit for bit the same, for each parameter that has a gradient.

    Collective. All ranks pass alike parameters in the same order and the same `setting`, the caller's description of
    what it is doing; otherwise every rank raises. One that has a gradient on some ranks only (they used it, the others
    did not) is averaged as well: ranks need not have used the same ones.
    """
    listed: list[nn.Parameter] = []
    problem: Exception | None = None
    try:
        listed = _listed(params)
    except (NotImplementedError, ValueError) as error:
        problem = error
    entries = [setting, *(f"shape {list(p.shape)} of {p.dtype} on {p.device.type}" for p in listed)]
    if group.size == 1:
        if problem is not None:
            raise problem
        return
    has_gradient = _agreed(group, listed, entries, problem)
    chosen = [p for p, wanted in zip(listed, has_gradient, strict=True) if wanted]
    if not chosen:
        raise ValueError(
            "no parameter has a gradient on any rank, and those without one are not averaged: average after backward "
            "and before zero_grad"
        )
    with torch.no_grad():
        started: deque[tuple[Work, torch.Tensor, list[torch.Tensor]]] = deque()
        for piece in pieces(chosen, piece_bytes):
            flat = _packed(piece, group.size)
            started.append((group.all_reduce(flat), flat, piece))
            if len(started) > 1:  # two at a time: one is on the wire while the other is packed or unpacked
                _finish(*started.popleft())
        while started:
            _finish(*started.popleft())
        group.mark(flat.device)


def _listed(params: Parameters) -> list[nn.Parameter]:
    """The parameters, each once; what torch takes, and torch's error for anything else."""
    found: dict[int, nn.Parameter] = {}
    for given in params:
        if not isinstance(given, nn.Parameter | dict):
            raise NotImplementedError(
                f"Parameter input of type {type(given)} is not supported: give a model's parameters() or an "
                "optimizer's param_groups"
            )
        for parameter in given["params"] if isinstance(given, dict) else (given,):
            if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.device.type == "meta":
                raise ValueError(
                    "a parameter holds no values yet (a lazy module, or the meta device): initialise it first"
                )
            found[id(parameter)] = parameter
    if not found:
        raise ValueError(
            "there are no parameters to average. A generator, such as model.parameters(), is used up by one loop over "
            "it: call it anew for each averaging"
        )
    return list(found.values())


def _agreed(
    group: C10dGroup, parameters: Sequence[nn.Parameter], entries: Sequence[str], problem: Exception | None
) -> list[bool]:
    """Whether each parameter has a gradient on some rank, once it is clear that all ranks mean the same parameters.

    One collective of four numbers where ranks agree. Without it a rank with one gradient more or less would add its
    parameters to the wrong ones of its peers, or crash inside the collective.
    """
    mine = [parameter.grad is not None for parameter in parameters]
    what = 0 if problem is not None else _digest(json.dumps(entries).encode())
    which = _digest(bytes(mine))
    device = parameters[0].device if parameters else _default_device(group)
    extremes = torch.tensor([what, -what, which, -which], dtype=torch.int64, device=device)
    group.all_reduce(extremes, "max").wait()
    most_what, least_what, most_which, least_which = group.read(extremes)
    if most_what != -least_what or not most_what:
        _raise_difference(group, entries, problem)
    if most_which != -least_which:
        any_rank = torch.tensor(mine, dtype=torch.uint8, device=device)
        group.all_reduce(any_rank, "max").wait()
        mine = [bool(value) for value in group.read(any_rank)]
    return mine


def _digest(data: bytes) -> int:
    """A positive number that fits an int64, with room for its negative."""
    return 1 + int.from_bytes(hashlib.sha256(data).digest()[:7], "little")


def _default_device(group: C10dGroup) -> torch.device:
    devices = group.process_group._device_types
    cpu = torch.device("cpu")
    return (
        cpu
        if cpu in devices or not devices
        else torch.device(devices[0].type, torch.accelerator.current_device_index())
    )


def _raise_difference(group: C10dGroup, entries: Sequence[str], problem: Exception | None) -> None:
    """Ranks do not agree, and all of them know: each tells what it has, and raises."""
    payload = json.dumps({"entries": list(entries), "problem": str(problem) if problem else None}).encode()
    said = [json.loads(part) for part in group.exchange("parameters to average", payload, timeout_s=AGREE_WITHIN_S)]
    if problem is not None:
        raise problem
    failed = [rank for rank, theirs in enumerate(said) if theirs["problem"] is not None]
    if failed:
        raise PeerFailedError(
            f"rank {failed[0]} could not average its parameters: {said[failed[0]]['problem']}",
            failed_ranks=failed,
            rank=group.rank,
        )
    # Every rank compares with rank 0, and rank 0 with the first that differs from it.
    other = next((rank for rank, theirs in enumerate(said) if theirs["entries"] != said[0]["entries"]), 0)
    other = other if list(entries) == said[0]["entries"] else 0
    raise MismatchError(
        f"ranks are averaging different things: {first_difference(entries, said[other]['entries'], other)}. Every rank "
        "must build the same model and averager, take the same number of steps and load the same checkpoint",
        rank=group.rank,
        group=group.name,
    )


def first_difference(mine: Sequence[str], theirs: Sequence[str], other: int) -> str:
    """Of two descriptions: the setting first, then one entry per parameter."""
    for place, (here, there) in enumerate(zip(mine, theirs, strict=False)):
        if here != there:
            what = "" if place == 0 else f"parameter number {place - 1} is "
            return f"{what}{here} here, {there} on rank {other}"
    return f"{len(mine) - 1} parameters here, {len(theirs) - 1} on rank {other}"


def _packed(piece: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """A flat copy, divided: dividing first keeps half precision from overflowing, and is what torch does."""
    flat = torch.empty(sum(tensor.numel() for tensor in piece), dtype=piece[0].dtype, device=piece[0].device)
    places = _places(flat, piece)
    if flat.device.type == "cpu":
        for place, tensor in zip(places, piece, strict=True):
            torch.div(tensor, size, out=place)  # in one pass over the memory
        return flat
    torch._foreach_copy_(places, list(piece))  # in a few kernels
    return flat.div_(size)


def _places(flat: torch.Tensor, piece: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = flat.split([tensor.numel() for tensor in piece])
    return [part.view(tensor.shape) for part, tensor in zip(parts, piece, strict=True)]


def _finish(work: Work, flat: torch.Tensor, piece: list[torch.Tensor]) -> None:
    work.wait()
    # Into the parameters' own memory: others may hold it (views, flattened optimizers, captured graphs).
    torch._foreach_copy_(piece, _places(flat, piece))
