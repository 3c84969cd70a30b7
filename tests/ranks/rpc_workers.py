"""What the tests of RPC share: ranks that are RPC workers too, and gradients of a context by parameter name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc


@contextmanager
def worker(folder: str, *, graceful: bool = True) -> Iterator[int]:
    """This rank as the RPC worker `rank0`, `rank1`, …; `graceful` waits at the end until all have come there."""
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/rpc", num_worker_threads=4, _transports=["uv"], rpc_timeout=20
    )
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    try:
        yield rank
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    # Whoever opened a context tells the others when it is closed, and nobody waits for that; it keeps their graph.
    while graceful and int(dist_autograd._get_debug_info()["num_autograd_contexts"]):
        time.sleep(0.002)
    rpc.shutdown(graceful=graceful)


def in_context(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients that a pass in a context of its own leaves there."""
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss(model)])
        return of_context(model, context)


def of_context(model: nn.Module, context: int) -> dict[str, torch.Tensor]:
    found = dist_autograd.get_gradients(context)
    return {name: found[parameter].clone() for name, parameter in model.named_parameters() if parameter in found}


def alike(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], **close: Any) -> None:
    assert list(mine) == list(theirs)
    for name, gradient in mine.items():
        other = theirs[name]
        assert gradient.is_sparse == other.is_sparse, name
        torch.testing.assert_close(gradient.to_dense(), other.to_dense(), msg=lambda m, n=name: f"{n}: {m}", **close)


def refusal(act: Callable[[], Any]) -> str:
    """What the error says that `act` raises. Distributed autograd makes a RuntimeError of any."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was raised")
