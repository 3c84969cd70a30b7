"""What the compiler must not look into. Said in ways that do not load it, as its own decorators do.

Where it captures a caller, a marked function breaks the graph there, and is called as it is. Where such a function is
about to run by itself, its frame is passed over; and all that it calls too, or else these are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from phalanx.api import replicate
from phalanx.api.ddp import DistributedDataParallel
from phalanx.compose.compile import arrivals
from phalanx.reducer import grad_hooks, watch
from phalanx.reducer.roll_call import RollCall

_eval_frame = torch._C._dynamo.eval_frame


def mark() -> None:
    pass_over(DistributedDataParallel.forward, because="it prepares and ends a step of DistributedDataParallel")
    pass_over(DistributedDataParallel._run_ddp_forward)
    pass_over(DistributedDataParallel._pre_forward, with_all_it_calls=True)
    pass_over(DistributedDataParallel._post_forward, with_all_it_calls=True)
    for entry in (RollCall._on_any, RollCall._on_last):
        pass_over(entry, with_all_it_calls=True)
    # Torch calls these wherever a module gets a parameter or a part, also within its compiler.
    for told in (watch.note_registration, replicate.refuse_torchs_ddp):
        run_as_it_is(told, with_all_it_calls=True)
    grad_hooks.compiler.prepare = _prepare_hook


def _prepare_hook(parameter: torch.Tensor, hook: Callable[..., Any]) -> None:
    if isinstance(hook, FunctionType):  # the roll call's are no functions, and call what is marked above
        arrivals.give_twin(parameter, hook)


def pass_over(function: Callable[..., Any], *, because: str = "", with_all_it_calls: bool = False) -> None:
    """Let torch.compile run this function as it is, and what it calls as well if so said."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = because or None  # type: ignore[attr-defined]
    run_as_it_is(function, with_all_it_calls=with_all_it_calls)


def run_as_it_is(function: Callable[..., Any], *, with_all_it_calls: bool = False) -> None:
    """Do not compile it where it is about to run by itself. Where its caller is captured, it is captured with it."""
    skip, default = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
    strategy = _eval_frame._FrameExecStrategy(skip, skip if with_all_it_calls else default)
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
