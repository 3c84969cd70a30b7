"""Pickling a DDP module: the wrapped module and the options travel, the engine is built anew where it arrives."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from phalanx.api.ddp.options import BucketCaps

# What belongs to this process.
_LOCAL = (
    "process_group",
    "reducer",
    "logger",
    "_engine",
    "_watched",
    "_hook_call",
    "_lowering",
    "_delayed",
    "_watched_delay",
    "_contexts",
    "_norms",
    "_norms_of",
    "_buffer_tables",
    "_buffer_pieces",
)


class Pickling:
    """The part of a DDP module that pickles it, for the default process group alone, as torch's does."""

    process_group: Any
    logger: Any
    static_graph: bool
    forward_sync_buffers: bool
    bucket_bytes_cap: int
    bucket_bytes_cap_default: bool
    device_ids: Any
    _caps: BucketCaps
    _delayed: Any
    _delay_arguments: Any
    _delay_all_reduce_params: list[nn.Parameter]
    _delay_all_reduce_all_params: bool
    _log_and_throw: Callable[[type[Exception], str], None]
    _build_params_for_reducer: Callable[[], tuple[list[nn.Parameter], list[bool]]]
    _build_debug_param_to_name_mapping: Callable[[Sequence[nn.Parameter]], dict[int, str]]
    _build_engine: Callable[..., None]
    _register_delay_all_reduce_hook: Callable[..., None]

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in _LOCAL:
            state.pop(name, None)
        state["_comm_hooks"] = []  # as with torch, hooks are registered anew: their state may hold a process group
        state["broadcast_buffers"] = self.forward_sync_buffers  # a property: torch's own class reads it, old and new
        return state

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class that was made on the fly cannot be found again by its name: its nearest ancestor that can stands in.
        reduced = super().__reduce_ex__(protocol)
        return (new, (nearest_importable(type(self)),), *reduced[2:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = dist.distributed_c10d._get_default_group()
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]  # what this is a part of is one
        self.__dict__.setdefault("require_forward_param_sync", True)
        self.__dict__.setdefault("require_backward_grad_sync", True)
        self.__dict__.setdefault("forward_sync_buffers", self.__dict__.pop("broadcast_buffers", True))
        if "_caps" not in self.__dict__:  # pickled by torch's own class, which was swapped for ours since
            first = int(dist._DEFAULT_FIRST_BUCKET_BYTES) if self.bucket_bytes_cap_default else self.bucket_bytes_cap
            self._caps = BucketCaps(self.bucket_bytes_cap, first, tuple(self.__dict__.get("bucket_bytes_cap_list", ())))
        self.logger = self._delayed = None
        parameters, sparse = self._build_params_for_reducer()
        if self._delay_all_reduce_params:  # a parameter does not take its hooks along
            self._register_delay_all_reduce_hook(self.bucket_bytes_cap, self._delay_arguments[1], self.device_ids)
            if self._delay_all_reduce_all_params:
                return
        self._build_engine(parameters, sparse, self._build_debug_param_to_name_mapping(parameters), self.static_graph)

    def _check_default_group(self) -> None:
        try:
            is_default = self.process_group == dist.distributed_c10d._get_default_group()
        except (RuntimeError, ValueError):
            is_default = False
        if not is_default:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, when "
                "you have called init_process_group and have not passed process_group argument to DDP constructor",
            )


def new(cls: type) -> Any:
    """An instance without its state; what an unpickler calls."""
    return cls.__new__(cls)  # type: ignore[call-overload]


def nearest_importable(cls: type) -> type:
    """The class itself or its first ancestor that a module holds under its name."""
    for candidate in cls.__mro__:
        found: Any = sys.modules.get(candidate.__module__)
        for part in candidate.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is candidate:
            return candidate
    return cls
