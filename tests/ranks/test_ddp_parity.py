"""Training beside torch's own class in the same ranks: the same bits at world size 2, to rounding at 3."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Pair, image_loss, images, square_loss
from tests.ranks.replicas import batch, mlp
from torch import nn
from torch.distributed.algorithms.join import Join

from phalanx.testing import ranks

MODELS = {"mlp": (mlp, square_loss), "conv": (BatchNormNet, image_loss)}
SMALL_BUCKETS = {"bucket_cap_mb": 0.0005}
OPTIONS = {
    "plain": {},
    "buckets": SMALL_BUCKETS,
    "view": {"gradient_as_bucket_view": True, **SMALL_BUCKETS},
    "unused": {"find_unused_parameters": True, **SMALL_BUCKETS},
    "static": {"static_graph": True, **SMALL_BUCKETS},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("which", MODELS)
@ranks(2)
def test_twenty_steps_to_the_bit(which: str, options: dict) -> None:
    make, loss = MODELS[which]
    Pair.of(make, **options).train(loss)


@pytest.mark.parametrize("options", [OPTIONS["buckets"], OPTIONS["view"]], ids=["buckets", "view"])
@pytest.mark.parametrize("which", MODELS)
@ranks(3)
def test_three_ranks_to_rounding(which: str, options: dict) -> None:
    make, loss = MODELS[which]
    Pair.of(make, **options).train(loss, steps=8, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("view", [False, True])
@ranks(2)
def test_zeroed_either_way(view: bool, set_to_none: bool) -> None:
    Pair.of(mlp, gradient_as_bucket_view=view).train(square_loss, steps=5, set_to_none=set_to_none)


@pytest.mark.parametrize("which", MODELS)
@ranks(2)
def test_accumulation_under_no_sync(which: str) -> None:
    make, loss = MODELS[which]

    def accumulated(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        with model.no_sync():
            loss(model, rank, 2 * step).backward()
        return loss(model, rank, 2 * step + 1)

    Pair.of(make).train(accumulated)


class Mixed(nn.Module):
    """Single and double precision and a complex weight, in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.single = nn.Linear(6, 4)
        self.wide = nn.Linear(4, 4).double()
        self.rotation = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(torch.tanh(self.single(x)).double())
        return torch.view_as_real(hidden.float() * self.rotation).square().sum(-1)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, SMALL_BUCKETS], ids=["plain", "view", "small"]
)
@ranks(2)
def test_mixed_and_complex_dtypes(options: dict) -> None:
    Pair.of(Mixed, **options).train(square_loss, lr=0.001, steps=8)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(20, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x).mean(1))


@ranks(2)
def test_sparse_embedding() -> None:
    pair = Pair.of(Lookup)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair.both()]  # momentum is dense
    for step in range(6):
        for model, optimizer in zip(pair.both(), optimizers, strict=True):
            optimizer.zero_grad()
            words = torch.randint(0, 20, (5, 3), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            model(words).square().mean().backward()
        mine, other = (model.module.table.weight.grad for model in pair.both())
        assert mine.is_sparse and other.is_sparse
        assert torch.equal(mine.to_dense(), other.to_dense())
        for optimizer in optimizers:
            optimizer.step()
        pair.compare_state(f"after step {step}")


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("which", MODELS)
@ranks(2)
def test_uneven_inputs_under_join(which: str, by_initial: bool) -> None:
    """Rank 1 has three batches more: rank 0 shadows them, and all end with the model of the last to finish."""
    rank = dist.get_rank()
    make, loss = MODELS[which]
    pair = Pair.of(make)
    for model in pair.both():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join(divide_by_initial_world_size=by_initial):
            for step in range(3 + 3 * rank):
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
    pair.compare_state("after join")


@ranks(2)
def test_uneven_inputs_with_accumulation() -> None:
    rank = dist.get_rank()
    pair = Pair.of(mlp, find_unused_parameters=True)
    for model in pair.both():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Join([model]):
            for step in range(2 + 2 * rank):
                with model.no_sync():
                    square_loss(model, rank, 10 + step).backward()
                square_loss(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    pair.compare_state("after join")


def _uneven(model: nn.Module, rank: int) -> None:
    with model.join(throw_on_early_termination=True):
        for step in range(2 + rank):
            model(batch(rank, step)).sum().backward()


@ranks(2)
def test_join_can_stop_all_ranks_early() -> None:
    rank = dist.get_rank()
    pair = Pair.of(mlp)
    for model in pair.both():
        with pytest.raises(RuntimeError, match=r"exhausted|Detected at least one rank"):
            _uneven(model, rank)


@ranks(2)
def test_eval_and_inference_need_no_partner() -> None:
    pair = Pair.of(BatchNormNet)
    pair.train(image_loss, steps=2)
    if dist.get_rank() == 0:
        outputs = []
        for model in pair.both():
            model.eval()
            with torch.no_grad():
                outputs.append(model.module(images(0, 9)))
        assert torch.equal(*outputs)
    dist.barrier()


@ranks(2)
def test_clipping_and_autocast() -> None:
    pair = Pair.of(mlp)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch(rank, step)).float().square().mean()

    for step in range(4):
        norms = []
        for model in pair.both():
            model.zero_grad()
            loss(model, dist.get_rank(), step).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        assert torch.equal(*norms)
        pair.compare_gradients(f"in step {step}")
