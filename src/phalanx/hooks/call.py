"""Calling a hook written for torch's DDP, ``(state, bucket) -> Future``, as a reduction of the engine's."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from phalanx.comm.c10d import LOOK_EVERY_S, C10dGroup
from phalanx.comm.group import Work
from phalanx.errors import ReducerStateError
from phalanx.hooks.grad_bucket import GradBucket
from phalanx.reducer.bucket import Bucket

TorchHook = Callable[[Any, Any], torch.futures.Future[Any]]


class HookCall:
    """A hook and its state. Called by the reducer with a full bucket; the hook averages, or whatever it does instead."""

    def __init__(self, hook: TorchHook, state: object, group: C10dGroup, num_buckets: Callable[[], int]) -> None:
        self._hook = hook
        self._state = state
        self._group = group
        self._num_buckets = num_buckets

    def __call__(self, bucket: Bucket, buffer: torch.Tensor) -> HookWork:
        view = GradBucket(bucket, buffer, is_last=bucket.index == self._num_buckets() - 1)
        return HookWork(self.start(view), bucket, buffer, hook_name(self._hook), self._group)

    def start(self, bucket: Any) -> torch.futures.Future[Any]:
        """Call the hook on a bucket as it is."""
        future = self._hook(self._state, bucket)
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future, which a Work returns
            raise TypeError(
                f"the communication hook {hook_name(self._hook)} must return a torch.futures.Future that holds a tensor "
                f"like bucket.buffer(); for bucket {bucket.index()} it returned {type(future).__name__}"
            )
        return future

    def weakly(self) -> WeakHookCall:
        return WeakHookCall(self)


class WeakHookCall:
    """What the reducer gets: it must not keep a hook, whose state may lead to the model and so back to the reducer."""

    def __init__(self, call: HookCall) -> None:
        self._call = weakref.ref(call)

    def __call__(self, bucket: Bucket, buffer: torch.Tensor) -> HookWork:
        return self._there()(bucket, buffer)

    def start(self, bucket: Any) -> torch.futures.Future[Any]:
        return self._there().start(bucket)

    def _there(self) -> HookCall:
        call = self._call()
        if call is None:
            raise ReducerStateError("the module whose communication hook this was is gone")
        return call


class HookWork(Work):
    """A hook's future, waited for in a way that sees a peer's failure, and its value written to where it belongs."""

    def __init__(
        self, future: torch.futures.Future[Any], bucket: Bucket, buffer: torch.Tensor, hook: str, group: C10dGroup
    ) -> None:
        self._future = future
        self._bucket = bucket
        self._buffer = buffer
        self._hook = hook
        self._group = group
        self._value: torch.Tensor | None = None

    def done(self) -> bool:
        return self._value is not None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._value is not None:
            return
        if self._buffer.device.type == "cpu" and not self._future.done():
            over = threading.Event()
            self._future.add_done_callback(lambda _: over.set())
            while not over.wait(LOOK_EVERY_S):
                self._group.check_notices()
        try:
            value = self._future.wait()
        except RuntimeError as error:
            if "closed by peer" in str(error) or "timed out" in str(error).lower():
                raise self._group.explain(error, f"the communication hook {self._hook}") from error
            raise
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        self._value = self._checked(value)
        if not self._value.is_sparse and self._value.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(self._value.view(-1))

    def value(self) -> torch.Tensor:
        assert self._value is not None
        return self._value

    def _checked(self, value: object) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"the communication hook {self._hook} must give a tensor like bucket.buffer(); for bucket "
                f"{self._bucket.index} its future held {type(value).__name__}"
            )
        if value.numel() != self._buffer.numel():
            raise ValueError(
                f"the communication hook {self._hook} must give a tensor of {self._buffer.numel()} elements, as "
                f"bucket.buffer() has; for bucket {self._bucket.index} it gave {list(value.shape)}"
            )
        return value


def hook_name(hook: TorchHook) -> str:
    """What to call it in errors and in logging data."""
    return getattr(hook, "__qualname__", None) or type(hook).__name__
