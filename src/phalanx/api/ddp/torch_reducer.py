"""The `reducer` attribute of a DDP module: what torch's own hooks, its pipelining and its tests call on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.api.ddp.contexts import ContextGradients
from phalanx.errors import ReducerStateError
from phalanx.hooks.builtin import summed
from phalanx.hooks.call import WeakHookCall
from phalanx.hooks.grad_bucket import GradBucket
from phalanx.reducer.bucket import ParameterSlot
from phalanx.reducer.reducer import Reducer


class TorchReducer:
    """torch's reducer interface over the engine. `armed` is whether the next backward pass synchronises."""

    def __init__(
        self, engine: Reducer, process_group: dist.ProcessGroup, *, find_unused: bool, on_error: Callable[[str], None]
    ) -> None:
        self.engine = engine
        self.armed = False
        self.owes_step = False
        """Whether a forward pass announced a step that has not taken place yet."""
        self.contexts: Callable[[], ContextGradients | None] = lambda: None
        """What averages gradients that are left in a context, once RPC is in use: a weak reference, as it keeps the
        nodes of the parameters, and their hooks lead here."""
        self._num_plans = engine.stats.num_plans
        self._process_group = process_group
        self._find_unused = find_unused
        self._on_error = on_error
        self._futures: list[torch.futures.Future[Any]] = []
        self._joined: tuple[Any, bool] | None = None
        engine.gate = self._gate
        engine.on_report.append(lambda _: self._after_step())

    def _gate(self) -> bool:
        if not self.armed and (gradients := self.contexts()) is not None:
            gradients.check_plain_pass()
        return self.armed

    def _after_step(self) -> None:
        # torch's contract is one synchronised pass per forward. With unused parameters looked for, a further pass over
        # the same outputs may bring what the first did not, so there the gate stays open until the next forward.
        self.armed = self.armed and self._find_unused
        self.owes_step = False
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    # -- called by the module -------------------------------------------------------------------------------------

    def prepare_for_forward(self) -> None:
        return None

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """A forward pass is over, and its backward will synchronise. `outputs` are not needed: what arrives, arrives."""
        self._check_reducer_finalized()
        self.engine.divisor = self.take_divisor()
        self.armed = self.owes_step = True
        if self._find_unused:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                pass

    def take_divisor(self) -> int | None:
        """What to divide the next step's sum by, where that is not the number of ranks: of some, inputs have run out."""
        if self._joined is None:
            return None
        (work, by_initial_size), self._joined = self._joined, None
        work.wait()
        return None if by_initial_size else int(self.engine.group.read(work.result()[0].view(1))[0])

    def withdraw(self) -> bool:
        """Expect no backward pass any more; returns whether one was expected."""
        was_armed = self.armed
        self.disarm()
        return was_armed

    def disarm(self) -> None:
        self.armed = self.owes_step = False

    def _check_reducer_finalized(self) -> None:
        """Raise, in torch's words and with the parameters' names, if the step before is not over."""
        waiting = self.engine.unfinished()
        if not waiting:
            return
        message = unfinished_message(
            waiting, self.engine.group.rank, static=self.engine.options.static, find_unused=self._find_unused
        )
        error = ReducerStateError(message, rank=self.engine.group.rank, step=self.engine.step)
        self._on_error(str(error))
        self.engine.group.post_failure(self.engine.topic, str(error))
        raise error

    # -- the rest of torch's interface ------------------------------------------------------------------------------

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were laid out anew since this was last asked; the engine does so by itself."""
        before, self._num_plans = self._num_plans, self.engine.stats.num_plans
        return before != self._num_plans and self.engine.planner.has_replanned

    def _push_all_rebuilt_params(self) -> None:
        return None

    def _delay_all_reduce(self) -> None:
        """torch's first step with a static graph ends by this; Lightning calls it. Ours has ended with its backward."""

    def _get_local_used_map(self) -> torch.Tensor:
        used = self.engine.stats.used_by
        counts = [self.engine.group.size] * len(self.engine.slots) if used is None else used
        return torch.tensor(counts, dtype=torch.int32, device=self.engine.buckets[0].spec.device)

    def _ddp_graph_static(self) -> bool:
        return self.engine.stats.graph_is_static

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = len(self.engine.buckets) - 1
        return [
            GradBucket(bucket, torch.zeros_like(bucket.gradients), is_last=bucket.index == last)
            for bucket in self.engine.buckets
        ]

    def _run_allreduce_hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The sum: torch's callers divide it themselves."""
        return summed(bucket.buffer(), self._process_group)

    def _run_comm_hook(self, bucket: Any) -> torch.futures.Future[Any]:
        hook = self.engine.bucket_hook
        return hook.start(bucket) if isinstance(hook, WeakHookCall) else self._run_allreduce_hook(bucket)

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self._futures += list(futures)

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._joined = (work, use_static_world_size)

    def _set_sparse_metadata(self, metadata: dict[str, torch.Tensor]) -> None:
        """By parameter, the rows that any rank has: torch packs gradients by them; ours gather what each has."""
        sparse = [bucket.slots[0].name for bucket in self.engine.buckets if bucket.spec.sparse]
        for name, rows in metadata.items():
            if name not in sparse:
                raise ValueError(f"no parameter {name!r}; those with sparse gradients: {', '.join(sparse) or 'none'}")
            if not isinstance(rows, torch.Tensor) or rows.is_floating_point():
                raise TypeError(f"the metadata of {name} must be a tensor of row numbers, got {rows!r:.60}")

    def _remove_autograd_hooks(self) -> None:
        self.engine.remove_hooks()
        if (gradients := self.contexts()) is not None:
            gradients.close()

    def _reset_state(self) -> None:
        self.engine.reset()
        self.disarm()

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group


def unfinished_message(waiting: Sequence[ParameterSlot], rank: int, *, static: bool, find_unused: bool) -> str:
    """Programs match on torch's sentences here: the beginning and the list of indices are kept as they are."""
    lines = ["Expected to have finished reduction in the prior iteration before starting a new one. "]
    if static:
        lines[0] += (
            "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
            "in first iteration, but then got unused in the second iteration. this is not compatible with static_graph "
            "set to True."
        )
    elif find_unused:
        lines[0] += (
            "Since `find_unused_parameters=True` is enabled, this likely means that not all `forward` function outputs "
            "participate in calculating loss."
        )
    else:
        lines[0] += (
            "Some parameters got no gradient: look for unused ones by passing the keyword argument "
            "`find_unused_parameters=True` to DistributedDataParallel, or use phalanx.replicate, which needs no flag; "
            "and make sure that all `forward` function outputs participate in calculating loss."
        )
    lines.append(
        f"Parameter indices which did not receive grad for rank {rank}: {' '.join(str(slot.index) for slot in waiting)}"
    )
    lines.append(f"Parameters which did not receive grad for rank {rank}: {', '.join(slot.name for slot in waiting)}")
    if dist.get_debug_level() == dist.DebugLevel.OFF:
        lines.append(
            "For more of this kind, set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
        )
    return "\n".join(lines)
