"""One rank's state given to all: that of optimizers and the like, by way of their state_dict."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from phalanx.comm.coalesced import broadcast_coalesced
from phalanx.comm.group import Group


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
        sent = [tensor.detach().to(device).contiguous() for tensor in outline.tensors]
        broadcast_coalesced(group, sent, source=source)
        return
    text, places = pickle.loads(_send(group, b"", source=source, device=device))
    tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, _ in places]
    broadcast_coalesced(group, tensors, source=source)
    on_cpu = [tensor.cpu() if home == "cpu" else tensor for tensor, (_, _, home) in zip(tensors, places, strict=True)]
    for holder, state in zip(holders, _Filled(text, on_cpu).load(), strict=True):
        holder.load_state_dict(state)


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
        places = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in self.tensors]
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
    data = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    if group.rank == source:
        data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    group.broadcast(data, source).wait()
    return bytes(data.tolist()) if group.rank != source else payload
