"""Contexts of distributed autograd, as the DDP module asks for them."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed.autograd as dist_autograd
from torch._C._distributed_rpc import _is_current_rpc_agent_set

from phalanx.api.ddp.contexts import ContextGradients
from phalanx.compose.rpc.gradients import RpcGradients
from phalanx.reducer.reducer import Reducer


class RpcContexts:
    """The provider that `phalanx.api.ddp.contexts` knows."""

    def in_use(self) -> bool:
        return bool(_is_current_rpc_agent_set())

    def current(self) -> int | None:
        if not _is_current_rpc_agent_set():
            return None
        try:
            return int(dist_autograd._current_context()._context_id())
        except RuntimeError:  # torch has no other way to say that there is none
            return None

    def make(self, engine: Reducer, *, finds_unused: bool, withdraw: Callable[[], bool]) -> ContextGradients:
        return RpcGradients(engine, finds_unused=finds_unused, withdraw=withdraw)
