"""How data parallelism works, one question per file.

Read in this order: `plan` (which gradients travel together), `bucket` (the memory they travel in), `order` (which
bucket may leave now), `unused` (what the ranks tell each other at the end of a step), `grad_hooks` (when a gradient is
there, when a backward pass is over), then a step: `arrivals` (gradients as they come), `intake` (one into its bucket),
`carrier` (a bucket on its way), `reports` (what the ranks said of the step), `hand_out` (the average back to the user),
`telling` (what follows from what they said), `steps` (when each of these happens) and `reducer` (what else others may
ask for, between steps). After that what makes it fast: `roll_call` and `runs` (most gradients are only counted, and
taken in together) and `deferred` (a report that need not stop a GPU's host). `layout` and `planner` keep buckets and
parameters together, `weights` are the ranks' shares, `breaking_off` is what happens when a step cannot go on and
`standing` whether ranks can afterwards, `refusals` are the errors that a step ends in, `spread` a parameter of which
each rank holds a part, `verify` compares the ranks' models, `watch` sees when one changes, `skips` agrees on buckets
that stay, `streams` are a GPU's, and `spans` names a step's parts in torch's profiler.
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
