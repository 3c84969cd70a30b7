"""Ranks that disagree in a `SyncBatchNorm`: an error on every rank, which says what is wrong; nobody waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx as px
from phalanx.api.sync_batch_norm.header import DTYPES, Grads, Header, first_difference
from phalanx.errors import MismatchError, PeerFailedError, PeerLostError
from phalanx.testing import ranks, run_ranks


def _good() -> torch.Tensor:
    return torch.randn(4, 3, 5)


WRONG: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "channels": (lambda: torch.randn(4, 2, 5), "expected an input of 3 channels", "ValueError: expected an input of 3"),
    "dimensions": (lambda: torch.randn(3), "at least 2D input", "ValueError: expected at least 2D"),
    "integers": (lambda: torch.ones(4, 3, 5, dtype=torch.int64), "floating-point", "got torch.int64"),
    "double": (lambda: torch.randn(4, 3, 5).double(), "input of torch.float32", "got torch.float64"),
}


def _one_rank_wrong(name: str) -> None:
    """The rank with the wrong input raises its own error, the others one that quotes it; the next batch is fine."""
    make, own, told = WRONG[name]
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    layer = px.SyncBatchNorm(3)
    if rank == last:
        with pytest.raises(ValueError, match=own):
            layer(make())
    else:
        with pytest.raises(PeerFailedError, match=told) as caught:
            layer(_good())
        assert caught.value.failed_ranks == (last,)
    assert layer.num_batches_tracked.item() == 0
    layer(_good()).sum().backward()
    assert layer.num_batches_tracked.item() == 1


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("name", WRONG)
def test_an_input_that_is_wrong_on_one_rank(name: str, backend: str) -> None:
    run_ranks(_one_rank_wrong, 2 if name != "channels" else 3, name, backend=backend)


def _disagreements() -> None:
    rank = dist.get_rank()
    layer = px.SyncBatchNorm(3, affine=False, track_running_stats=False)
    for mine, message in (
        ((torch.randn(4, 3), torch.randn(4, 3, 2))[rank], "rank 0 has an input of 2 dimensions and rank 1 .* of 3 dim"),
        ((torch.randn(4, 3), torch.randn(4, 3).bfloat16())[rank], "torch.float32 and rank 1 has one of torch.bfloat16"),
        ((torch.randn(4, 3), torch.randn(4, 3).double())[rank], "torch.float32 and rank 1 has one of torch.float64"),
        (torch.randn(4, 3).requires_grad_(rank == 0), "rank 0 records gradients and rank 1 does not"),
    ):
        with pytest.raises(MismatchError, match=message):
            layer(mine)
    assert layer(torch.randn(0 if rank else 4, 3)).shape[0] == (0 if rank else 4)  # all are still in step
    for size in (1, 0):
        with pytest.raises(ValueError, match=f"more than 1 value per channel .* and {size} value"):
            layer(torch.randn(0 if rank else size, 3))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_ranks_that_disagree(backend: str) -> None:
    run_ranks(_disagreements, 2, backend=backend)


@ranks(2)
def test_layers_of_different_size() -> None:
    with pytest.raises(MismatchError, match=r"rank 0's has 3 channels .* and rank 1's 4 channels"):
        px.SyncBatchNorm(3 + dist.get_rank())(torch.randn(4, 3 + dist.get_rank()))


@ranks(2, backend="phalanx")
def test_layers_in_another_order() -> None:
    layers = [px.SyncBatchNorm(3), px.SyncBatchNorm(3)]
    for layer in layers:
        layer(_good())
    with pytest.raises(MismatchError, match=r"rank 0 is in the layer that was number 1 .* rank 1 .* number 2"):
        layers[dist.get_rank()](_good())


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory, say")


def _leaves(where: str) -> None:
    layer = px.SyncBatchNorm(3)
    layer(_good()).sum().backward()
    if dist.get_rank() == 1:
        if where == "forward":
            raise SystemExit(3)
        try:
            _Raises.apply(layer(_good().requires_grad_())).sum().backward()
        except RuntimeError:
            raise SystemExit(3) from None
    with pytest.raises(PeerLostError, match="rank 1"):
        layer(_good().requires_grad_()).sum().backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_leaves_is_named(where: str) -> None:
    run_ranks(_leaves, 2, where, expect_exit={1: 3}, allow_leaks="a rank is gone", grace_s=10)


def test_headers() -> None:
    header = Header((1 << 33) + 5, 7, 4, DTYPES.index(torch.float32), Grads.INPUT | Grads.SOME)
    assert Header.decode(torch.tensor(header.encode(), dtype=torch.float32).tolist()) == header
    assert first_difference([header, Header(0), Header(0, shadow=True)]) is not None  # the empty one runs no backward
    assert first_difference([header, Header(0, grads=Grads.SOME), Header(0, shadow=True)]) is None


def test_alone_a_single_value_is_refused_as_by_torch() -> None:
    for layer in (px.SyncBatchNorm(2), nn.BatchNorm1d(2)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(torch.randn(1, 2))
    with pytest.raises(ValueError, match="at least 2D input"):
        px.SyncBatchNorm(2)(torch.randn(2))
