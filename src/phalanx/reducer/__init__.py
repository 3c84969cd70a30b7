"""How data parallelism works, one question per file.

Read in this order: `plan` (which gradients travel together), `bucket` (the memory they travel in), `order` (which
bucket may leave now), `unused` (what the ranks tell each other at the end of a step), `grad_hooks` (when a gradient is
there, when a backward pass is over), then a step: `intake` (a gradient into its bucket), `carrier` (a bucket on its way),
`hand_out` (the average back to the user) and `reducer` (when each of these happens). `layout` and `planner` keep buckets
and parameters together, `verify` compares the ranks' models, and `watch` sees when a model changes.
"""

from phalanx.reducer.options import Placement, ReducerOptions, ReducerStats
from phalanx.reducer.plan import BucketPolicy, BucketSpec, ParameterSpec, plan_buckets
from phalanx.reducer.reducer import Reducer

__all__ = [
    "BucketPolicy",
    "BucketSpec",
    "ParameterSpec",
    "Placement",
    "Reducer",
    "ReducerOptions",
    "ReducerStats",
    "plan_buckets",
]
