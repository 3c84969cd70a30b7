"""How a reducer behaves, as frozen options, and what it has counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from phalanx.reducer.plan import BucketPolicy


class Placement(Enum):
    """Where gradients live."""

    OWNED = "owned"
    """In the buckets. ``.grad`` is empty while a bucket is on its way, so that a second gradient of the same parameter
    can arrive safely, and is a view of the bucket when backward returns."""
    VIEW = "view"
    """In the buckets, and ``.grad`` is the view from the moment the gradient arrives (torch's bucket views)."""
    COPY = "copy"
    """Where autograd put them: copied into the bucket and the average copied back (torch's default)."""


@dataclass(frozen=True)
class ReducerOptions:
    """How a reducer behaves. Every rank must use equal options."""

    policy: BucketPolicy = field(default_factory=BucketPolicy)
    first_policy: BucketPolicy | None = None
    """Buckets until they are re-planned, where that differs; the first cap is then that of the last to leave."""
    placement: Placement = Placement.OWNED
    replan: bool = True
    """Lay out buckets anew, after the first step, in the order in which gradients really arrived."""
    settle_unused: bool = True
    """Settle, at the end of backward, what did not arrive; otherwise the step stays open until it has."""
    static: bool = False
    """Every pass has the same arrivals as the first; the first is reduced when it is over."""
    skip_unused_buckets: bool = False
    """Do not reduce a bucket of which nothing arrived. All ranks must then use the same parameters in every step."""
    wire_dtype: torch.dtype | None = None
    """Dense floating gradients are summed in this dtype; a bucket hook, where there is one, gets them as they are."""


@dataclass
class StepTimes:
    """When the last step's parts began and ended, in nanoseconds of the monotonic clock."""

    first_gradient_ns: int = 0
    first_launch_ns: int = 0
    backward_end_ns: int = 0
    finalized_ns: int = 0


@dataclass
class ReducerStats:
    """Counters since construction."""

    steps: int = 0
    waited_s: float = 0.0
    """Time in which this rank stood still for reductions at the end of backward."""
    kept: int = 0
    """Backward passes that kept their gradients local."""
    num_plans: int = 0
    used_by: list[int] | None = None
    """By parameter, how many ranks used it in the last step; None where all used all."""
    unused: tuple[str, ...] = ()
    """What no rank used in the last step."""
    buckets_launched: int = 0
    """In the last step."""
    graph_is_static: bool = True
    """Whether every step used the same parameters, on this rank."""
    times: StepTimes = field(default_factory=StepTimes)
