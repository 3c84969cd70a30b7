"""Calling a hook written for torch's DDP, ``(state, bucket) -> Future``, as a reduction of the engine's."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.comm.c10d import LOOK_EVERY_S, C10dGroup
from phalanx.comm.group import Work
from phalanx.errors import CollectiveTimeoutError, ReducerStateError
from phalanx.hooks.grad_bucket import GradBucket
from phalanx.reducer.bucket import Bucket

TorchHook = Callable[[Any, Any], torch.futures.Future[Any]]


class HookCall:
    """A hook and its state. Called by the reducer with a full bucket; the hook averages, or whatever it does instead.

    A hook may start further collectives when its first is over (PowerSGD does). On the CPU those would be started from
    Gloo's threads, in another order on each rank than those of the next bucket: with torch's own class that hangs. So
    a bucket's turn comes when the one before is over, unless the hook is known to start one collective only.
    """

    def __init__(self, hook: TorchHook, state: object, group: C10dGroup, num_buckets: Callable[[], int]) -> None:
        self._hook = hook
        self._state = state
        self._group = group
        self._num_buckets = num_buckets
        self._previous: HookWork | None = None
        self._in_turn = not _starts_one_collective(hook)

    def __call__(self, bucket: Bucket, buffer: torch.Tensor) -> HookWork:
        view = GradBucket(bucket, buffer, is_last=bucket.index == self._num_buckets() - 1)
        after = self._previous if bucket.index and self._in_turn and buffer.device.type == "cpu" else None
        work = self._previous = HookWork(self, view, bucket, buffer, after)
        work.start_in_turn()
        return work

    @property
    def name(self) -> str:
        return hook_name(self._hook)

    @property
    def group(self) -> C10dGroup:
        return self._group

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
        self, call: HookCall, view: GradBucket, bucket: Bucket, buffer: torch.Tensor, after: HookWork | None
    ) -> None:
        self._call = weakref.ref(call)  # the reducer keeps works for a while, and must not keep hooks
        self._view = view
        self._bucket = bucket
        self._buffer = buffer
        self._after = after
        self._hook = call.name
        self._group = call.group
        self._future: torch.futures.Future[Any] | None = None
        self._value: torch.Tensor | None = None
        self._failed = False

    def start_in_turn(self) -> bool:
        """Call the hook if it is this bucket's turn; returns whether that is over."""
        if self._future is None and not self._failed and (self._after is None or self._after.start_in_turn()):
            self._after = None
            call = self._call()
            if call is None:
                raise ReducerStateError("the module whose communication hook this was is gone")
            with self._noting_failure():
                self._future = call.start(self._view)
        return self._failed or (self._future is not None and self._future.done())

    def done(self) -> bool:
        return self._value is not None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._value is not None or self._failed:
            return
        if self._future is None:
            if self._after is not None:
                self._after.wait()
            self.start_in_turn()
        future = self._future
        assert future is not None
        if self._buffer.device.type == "cpu" and not future.done():
            self._wait_until_done(future)
        with self._noting_failure():
            self._value = self._checked(self._result_of(future))
        if not self._value.is_sparse and self._value.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(self._value.view(-1))

    def _wait_until_done(self, future: torch.futures.Future[Any]) -> None:
        over = threading.Event()
        future.add_done_callback(lambda _: over.set())
        within_s, began = self._group.timeout_s, time.monotonic()
        while not over.wait(LOOK_EVERY_S):
            self._group.check_notices()
            if time.monotonic() - began > within_s:  # its collectives have time-outs of their own, and are over by now
                self._failed = True
                raise CollectiveTimeoutError(
                    f"the future of the communication hook {self._hook} for bucket {self._bucket.index} did not complete "
                    f"within {within_s:g} s. It must be one that a collective completes, or that the hook sets",
                    rank=self._group.rank,
                    group=self._group.name,
                )

    def _result_of(self, future: torch.futures.Future[Any]) -> Any:
        try:
            value = future.wait()
        except RuntimeError as error:
            if "closed by peer" in str(error) or "timed out" in str(error).lower():
                raise self._group.explain(error, f"the communication hook {self._hook}") from error
            raise
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failed = True
            error.add_note(f"(in the communication hook {self._hook}, for bucket {self._bucket.index})")
            raise

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


_ONE_COLLECTIVE = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook"}


def _starts_one_collective(hook: TorchHook) -> bool:
    home = getattr(hook, "__module__", "") or ""
    if home == "phalanx.hooks.builtin":
        return True
    return home.startswith("torch.distributed.algorithms.ddp_comm_hooks.") and hook_name(hook) in _ONE_COLLECTIVE


def hook_name(hook: TorchHook) -> str:
    """What to call it in errors and in logging data."""
    return getattr(hook, "__qualname__", None) or type(hook).__name__
