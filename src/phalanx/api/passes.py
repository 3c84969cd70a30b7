"""What a user says of the passes of a replicated module: which of them synchronise, and what they weigh."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from phalanx.api.replica import replica_of
from phalanx.reducer.options import ReducerStats
from phalanx.reducer.reducer import Reducer
from phalanx.reducer.weights import Reduction

logger = logging.getLogger(__name__)
_weighted: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those of which it was said what weights cannot do


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Backward passes in this block keep their gradients local; the next one outside reduces all that was kept.

    Decided when backward runs, not when forward did. All ranks must agree.
    """
    replica = replica_of(module)
    replica.no_sync_depth += 1
    try:
        yield
    finally:
        replica.no_sync_depth -= 1


@contextmanager
def accumulate(module: nn.Module, n: int) -> Iterator[None]:
    """In this block every n-th backward pass synchronises, and with it all gradients since the last that did.

    What is left over when the block ends (a shorter last group) is synchronised then. Gradients add up, as autograd
    does it: divide the loss by n for their mean. All ranks run the same number of backward passes in the block.
    """
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"accumulate takes the number of backward passes per step, at least 1; got {n!r}")
    replica = replica_of(module)
    replica.accumulation.append(n)
    replica.num_backwards = 0
    finished = False
    try:
        yield
        finished = True
    finally:
        replica.accumulation.pop()
        left_over = replica.num_backwards % n
        replica.num_backwards = 0
        if finished and left_over:
            replica.reducer.synchronize()


def weight(module: nn.Module, n: float, *, reduction: Reduction = "mean") -> None:
    """This rank's weight in the next step's average: its number of samples or tokens. On all ranks of a step, or none.

    Call it before a backward pass whose loss is the mean over `n` samples, or with ``reduction="sum"`` their sum. The
    average is then the gradient of the mean over all ranks' samples: what one process would compute from all of them.
    Under `accumulate` or `no_sync` call it before each pass, with that pass's `n`: passes count by their share, and
    their weights add up. (Or once in a step, for gradients that you have scaled yourself.) Zero is for a batch without
    samples; its gradient must be zero too. `module` may be a `DistributedDataParallel`.
    """
    if isinstance(n, bool | str) or not hasattr(n, "__float__"):
        raise TypeError(f"a weight is a number of samples or tokens; got {n!r}")
    if not 0 <= n < float("inf"):
        raise ValueError(f"a weight is a number of samples or tokens, not negative and not infinite; got {n!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, as of the loss; got {reduction!r}")
    if reduction == "mean" and module not in _weighted:
        _weighted.add(module)
        if any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
            logger.warning(
                "%s has SyncBatchNorm: if batches differ in size, weights for the mean of a loss do not reach what lies "
                "below such a layer, whose backward adds up the ranks' gradients before they are weighted. Compute the "
                'loss as a sum and say phalanx.weight(…, reduction="sum"), which is exact',
                type(module).__name__,
            )
    _reducer_of(module).set_weight(float(n), reduction)


def synchronize(module: nn.Module) -> None:
    """Take part in this step though no backward pass of this rank reached the module: with zeros, or with what was kept.

    Needed only where a rank may skip the module in a step and reads its gradients (clipping, a GradScaler) before the
    optimizer steps; the optimizer's step calls it by itself.
    """
    replica_of(module).reducer.synchronize()


def step_stats(module: nn.Module) -> ReducerStats:
    """Counters of a replicated module, or of a DistributedDataParallel: steps so far and seconds spent waiting."""
    return _reducer_of(module).stats


def _reducer_of(module: nn.Module) -> Reducer:
    engine = getattr(module, "_engine", None)
    return engine if isinstance(engine, Reducer) else replica_of(module).reducer
