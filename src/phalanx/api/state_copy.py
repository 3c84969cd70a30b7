"""One rank's state given to all: that of optimizers and the like, by way of their state_dict."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from phalanx.comm.coalesced import broadcast_coalesced
from phalanx.comm.group import Group
from phalanx.errors import MismatchError
from phalanx.reducer.spread import part_of, spread_of


@runtime_checkable
class Stateful(Protocol):
    """An optimizer, a scheduler, a GradScaler: what can hand out its state and take another's."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def copy_state(group: Group, holders: Sequence[Stateful], *, source: int, device: torch.device) -> None:
    """Give every rank the source's state. All ranks pass alike holders; `device` is one that the group can send from.

    The ranks' states may differ in what they hold, too: an optimizer that has not stepped yet has none.
    """
    if group.size == 1 or not holders:
        return
    if group.rank == source:
        outline = _Outline()
        outline.dump([holder.state_dict() for holder in holders])
        _send(group, outline.packed(), source=source, device=device)
        sent = [part_of(tensor.detach()).to(device).contiguous() for tensor in outline.tensors]
        broadcast_coalesced(group, sent, source=source)
        return
    text, places = pickle.loads(_send(group, b"", source=source, device=device))
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _, _ in places]
    broadcast_coalesced(group, tensors, source=source)
    on_cpu = [
        tensor.cpu() if home == "cpu" else tensor for tensor, (_, _, home, _) in zip(tensors, places, strict=True)
    ]
    filled = _put_together(group, on_cpu, [spread for _, _, _, spread in places], holders)
    for holder, state in zip(holders, _Filled(text, filled).load(), strict=True):
        holder.load_state_dict(state)


def _put_together(
    group: Group, parts: list[torch.Tensor], spreads: list[str], holders: Sequence[Stateful]
) -> list[torch.Tensor]:
    """Of those that are parts, what they are parts of: spread here as the parameter that the state is of."""
    patterns: dict[str, torch.Tensor] = {}
    for holder in holders if any(spreads) else ():
        for parameters in getattr(holder, "param_groups", ()):
            for parameter in parameters["params"]:
                if (spread := spread_of(parameter)) is not None:
                    patterns.setdefault(spread.described(parameter), parameter)
    for place, described in enumerate(spreads):
        if described and described not in patterns:
            raise MismatchError(
                f"rank {group.rank} was sent state that is part of a {described}, and no parameter of its optimizers is "
                "spread like that: optimizers must be made alike on all ranks",
                rank=group.rank,
            )
        if described and (spread := spread_of(patterns[described])) is not None:
            parts[place] = spread.like(parts[place], patterns[described])
    return parts


class _Outline(pickle.Pickler):
    """A state without its tensors, which travel by themselves: they are large, and may lie on another device."""

    def __init__(self) -> None:
        self._text = io.BytesIO()
        super().__init__(self._text)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1

    def packed(self) -> bytes:
        places = []
        for tensor in self.tensors:
            spread = spread_of(tensor)
            described = "" if spread is None else spread.described(tensor)
            places.append((tuple(part_of(tensor).shape), tensor.dtype, tensor.device.type, described))
        return pickle.dumps((self._text.getvalue(), places))


class _Filled(pickle.Unpickler):
    def __init__(self, text: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(text))
        self._tensors = tensors

    def persistent_load(self, index: Any) -> torch.Tensor:
        return self._tensors[index]


def _send(group: Group, payload: bytes, *, source: int, device: torch.device) -> bytes:
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    group.broadcast(length, source).wait()
    data = torch.empty(int(group.read(length)[0]), dtype=torch.uint8, device=device)
    if group.rank == source:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    group.broadcast(data, source).wait()
    return bytes(data.tolist()) if group.rank != source else payload
