"""Delayed reduction: some gradients travel together, once the gradient of a chosen parameter is there."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.api import optimizer_watch
from phalanx.comm.c10d import group_of
from phalanx.comm.coalesced import broadcast_coalesced
from phalanx.comm.process_groups import own_group, release_group
from phalanx.reducer.grad_hooks import hook_gradient
from phalanx.reducer.options import ReducerOptions
from phalanx.reducer.plan import BucketPolicy
from phalanx.reducer.reducer import Reducer
from phalanx.reducer.spread import part_of
from phalanx.reducer.verify import TensorEntry, verify_same
from phalanx.reducer.watch import expects_sparse

Named = Sequence[tuple[str, nn.Parameter]]


def problem_with_delay(module: nn.Module, named: Any, trigger: Any) -> Exception | None:
    """Why these arguments cannot be used with this module, as the error to raise."""
    if (named is None) != (trigger is None):
        return ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    if named is None:
        return None
    pairs = list(named) if isinstance(named, Sequence) else [named]
    if not all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
        return TypeError(
            "delay_all_reduce_named_params must be a list of (name, parameter), as named_parameters() gives them, "
            f"got {named!r:.80}"
        )
    by_name: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    seen: set[int] = set()
    for name, parameter in pairs:
        if by_name.get(name) is not parameter or not isinstance(parameter, nn.Parameter):
            known = "another parameter has it" if name in by_name else "it has no parameter of that name"
            return ValueError(
                f"delay_all_reduce_named_params names {name!r}, which is not that parameter's name in the module: {known}"
            )
        if not parameter.requires_grad:
            return ValueError(f"delay_all_reduce_named_params has {name!r}, which does not require a gradient")
        if id(parameter) in seen:
            return ValueError(f"delay_all_reduce_named_params has {name!r} twice, maybe under another name")
        seen.add(id(parameter))
    if not isinstance(trigger, torch.Tensor) or not trigger.requires_grad or not trigger.is_leaf:
        got = type(trigger).__name__ if not isinstance(trigger, torch.Tensor) else "one that never gets a gradient"
        return TypeError(f"param_to_hook_all_reduce must be a parameter that requires a gradient, got {got}")
    return None


class DelayedReduction:
    """Averages the gradients of some parameters, starting when the trigger's gradient is there.

    It has an engine and a group of its own, so that the order of its collectives is no matter of DDP's buckets: a rank
    whose pass breaks off, or does not reach the trigger, keeps nobody waiting. Making one is collective.
    """

    def __init__(
        self, named: Named, trigger: nn.Parameter, module: nn.Module, process_group: dist.ProcessGroup
    ) -> None:
        group = group_of(own_group(process_group))
        verify_same(group, [TensorEntry.of(name, parameter, "delayed parameter") for name, parameter in named])
        broadcast_coalesced(group, [part_of(parameter).detach() for _, parameter in named], source=0)
        # All in one, but for the last and smallest: the bucket that ends the step waits for the end of backward.
        policy = BucketPolicy(sys.maxsize, sys.maxsize, last_bucket_bytes=min(_num_bytes(p) for _, p in named))
        self.engine = Reducer(
            sorted(named, key=lambda pair: _num_bytes(pair[1])),
            group,
            sparse=expects_sparse(module, sorted(named, key=lambda pair: _num_bytes(pair[1]))),
            options=ReducerOptions(policy=policy, replan=False),
            name=f"{type(module).__name__} (delayed)",
        )
        self._main: Reducer | None = None
        self._syncs = True
        self._triggered = False
        self._took_part = False
        self._owes_step = False
        this = weakref.ref(self)  # the trigger's hook must not lead back to the trigger

        def on_trigger(_: torch.Tensor) -> None:
            if (delayed := this()) is not None:
                delayed.trigger()

        self._unhook = hook_gradient(trigger, on_trigger)
        self.engine.gate = self._gate
        self.engine.hold = lambda: not self._triggered
        self.engine.on_report.append(lambda _: self._finished())
        self._own(process_group)

    def _own(self, process_group: dist.ProcessGroup) -> None:
        used = group_of_engine(self.engine)
        if used is not process_group:
            weakref.finalize(self, release_group, used).atexit = False

    def follow(self, main: Reducer) -> None:
        """End each step after that of DDP's own reducer: were the order another on each rank, they would wait in a ring."""
        self._main = main
        main.on_report.append(lambda _: self._settle())

    def _gate(self) -> bool:
        self._took_part = True
        if self._main is not None:
            self._main.enter_pass()
        return self._syncs

    def _finished(self) -> None:
        self._triggered = self._owes_step = False

    def announce(self, *, syncs: bool) -> None:
        """A forward pass is over. `syncs`: whether its backward averages, or keeps gradients for a later one."""
        self._syncs = self._owes_step = syncs
        self._triggered = self._took_part = False

    def trigger(self) -> None:
        """The gradient that was waited for is there: send what has arrived; what comes later leaves when it comes."""
        self._triggered = True
        self.engine.launch_ready()

    def _settle(self) -> None:
        """DDP's own step is over, as it is on every rank: take part also if no delayed gradient has arrived here."""
        if not self._took_part and self._syncs:
            self.engine.synchronize()
        self._took_part = False

    def replace_group(self, process_group: dist.ProcessGroup) -> None:
        self.engine.reset()
        self.engine.replace_group(group_of(own_group(process_group)))
        self._own(process_group)

    def close(self) -> None:
        self._unhook()
        self.engine.close()


class DelayedParameters:
    """The part of a DDP module that delays, by torch's method names."""

    module: nn.Module
    process_group: dist.ProcessGroup
    require_backward_grad_sync: bool
    parameters_to_ignore: set[str]
    _delay_all_reduce_params: list[nn.Parameter]
    _delay_all_reduce_all_params: bool
    _delay_arguments: tuple[list[tuple[str, nn.Parameter]], Any]
    _delayed: DelayedReduction | None

    def _register_delay_all_reduce_hook(
        self, bucket_cap_mb: Any, param_to_hook_all_reduce: nn.Parameter, device_ids: Any
    ) -> None:
        """Collective. The size of buckets and the devices have no say: all travels at once, where it is."""
        named, _ = self._delay_arguments
        self._delayed = DelayedReduction(named, param_to_hook_all_reduce, self.module, self.process_group)
        if self._delay_all_reduce_all_params:
            self._watched_delay = _WatchedDelay(self._delayed)
            optimizer_watch.watch(self._watched_delay)

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        if self._delayed is not None:
            self._delayed.trigger()
        return grad

    def _clear_grad_buffer(self) -> None:
        """Called after each forward pass. torch empties its buffer here; ours is filled as gradients come."""
        if self._delayed is not None and torch.is_grad_enabled():
            self._delayed.announce(syncs=self.require_backward_grad_sync)

    def join_hook(self, **kwargs: Any) -> Any:
        if self._delayed is not None:
            raise ValueError(
                "join cannot be used with delay_all_reduce_named_params: a rank that has run out does not reach "
                "param_to_hook_all_reduce. Use phalanx.replicate with phalanx.join, or do not delay"
            )
        return super().join_hook(**kwargs)  # type: ignore[misc]


class _WatchedDelay:
    """A DDP in which all is delayed: a rank whose loss reached none of it owes its peers a step."""

    def __init__(self, delayed: DelayedReduction) -> None:
        self.reducer = delayed.engine
        self._delayed = delayed

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for slot in self.reducer.slots if (parameter := slot.ref()) is not None]

    def has_changed(self) -> bool:
        return False

    def takes_part(self) -> bool:
        return self._delayed._owes_step


def group_of_engine(engine: Reducer) -> dist.ProcessGroup:
    process_group: dist.ProcessGroup = engine.group.process_group  # type: ignore[attr-defined]
    return process_group


def _num_bytes(parameter: torch.Tensor) -> int:
    return part_of(parameter).numel() * parameter.element_size()
