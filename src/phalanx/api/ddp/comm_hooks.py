"""Communication hooks of a DDP module, by torch's method names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from phalanx.api.ddp.logger import Logger
from phalanx.comm.c10d import C10dGroup
from phalanx.hooks.builtin import builtin_hook
from phalanx.hooks.call import HookCall, TorchHook, hook_name
from phalanx.hooks.registration import problem_with_hook
from phalanx.reducer.reducer import Reducer


class CommHooks:
    """The part of a DDP module that lets a user's function reduce its buckets."""

    logger: Logger | None
    process_group: Any
    _engine: Reducer
    _comm_hooks: list[Any]
    _group: Callable[[], C10dGroup]
    _log_and_throw: Callable[[type[Exception], str], None]

    def register_comm_hook(self, state: object, hook: TorchHook) -> None:
        """Let `hook(state, bucket)` average the buckets: it returns a Future that holds a tensor like the buffer."""
        self._check_comm_hook(hook)
        self._check_first_hook()
        assert self.logger is not None
        self.logger._set_comm_hook_name(hook_name(hook))
        self._comm_hooks.append((hook, state))
        self._use_hook(hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self._check_first_hook()
        assert self.logger is not None
        self.logger._set_comm_hook_name(str(comm_hook_type))
        hook = builtin_hook(comm_hook_type)
        self._comm_hooks.append((hook, self.process_group))
        self._use_hook(hook, self.process_group)

    def _use_hook(self, hook: TorchHook, state: object) -> None:
        engine = self._engine
        self._hook_call = HookCall(hook, state, self._group(), lambda: len(engine.buckets))
        engine.set_bucket_hook(self._hook_call.weakly())

    def _check_first_hook(self) -> None:
        if self._comm_hooks:
            self._log_and_throw(
                RuntimeError, "register_comm_hook or register_builtin_comm_hook can only be called once."
            )

    def _check_comm_hook(self, hook: Any) -> None:
        problem = problem_with_hook(hook)
        if problem is not None:
            self._log_and_throw(type(problem), str(problem))
