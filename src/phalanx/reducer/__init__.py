"""How data parallelism works, one question per file.

Read in this order: `plan` (which gradients travel together), `bucket` (the memory they travel in), `order` (which
bucket may leave now), `unused` (what the ranks tell each other at the end of a step), `grad_hooks` (when a gradient is
there, when a backward pass is over), `reducer` (a step, from the first gradient to the average), `verify` (that ranks
hold the same model) and `watch` (that they still do).
"""

from phalanx.reducer.plan import BucketPolicy, BucketSpec, ParameterSpec, plan_buckets
from phalanx.reducer.reducer import Placement, Reducer, ReducerOptions

__all__ = [
    "BucketPolicy",
    "BucketSpec",
    "ParameterSpec",
    "Placement",
    "Reducer",
    "ReducerOptions",
    "plan_buckets",
]
