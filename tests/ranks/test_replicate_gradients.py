"""What users do with gradients, and what kinds of them there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import (
    SMALL,
    assert_gradients,
    average_gradients,
    batch,
    check_steps,
    equal_on_all_ranks,
    gradients,
    mlp,
    plain_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.testing import ranks


@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_zero_grad_in_both_modes(set_to_none: bool) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(5):
        model.zero_grad(set_to_none=set_to_none)
        if not set_to_none and step:
            assert all(p.grad.eq(0).all() for p in model.parameters())
        plain_loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_without_zero_grad_averages_add_up() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(4):
        plain_loss(model, rank, step).backward()
        for r in range(2):
            (plain_loss(reference, r, step) / 2).backward()
        assert_gradients(model, gradients(reference))


@ranks(2)
def test_clip_grad_norm() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        mine = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        average_gradients(reference, plain_loss, step)
        theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(mine, theirs)
        assert_gradients(model, gradients(reference))


@ranks(2)
def test_a_gradient_that_the_user_points_elsewhere_is_the_users() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    kept = []
    for step in range(4):
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 2  # old code scales gradients so
            kept.append(parameter.grad)
        twice = lambda m, r, s: 2 * plain_loss(m, r, s)
        assert_gradients(model, average_gradients(reference, twice, step))
    plain_loss(model, rank, 9).backward()  # and on top of such a gradient
    reference_gradients = average_gradients(reference, lambda m, r, s: plain_loss(m, r, 9) + 2 * plain_loss(m, r, 3), 0)
    assert_gradients(model, reference_gradients)


@ranks(2)
def test_grad_scaler_and_autocast() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def loss(m: nn.Module, r: int, s: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(batch(r, s)).float().square().mean()

    for step in range(4):
        optimizer.zero_grad()
        value = loss(model, rank, step)
        if step == 2 and rank == 1:
            value = value * float("inf")  # an overflow on one rank is one on all: they skip the step together
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        if step != 2:
            reference.load_state_dict(model.state_dict())
            assert_gradients(model, average_gradients(reference, loss, step), rtol=2e-2, atol=2e-2)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        assert torch.equal(before, model[0].weight) == (step == 2)
        scaler.update()
        assert equal_on_all_ranks(torch.tensor(scaler.get_scale()))
        assert equal_on_all_ranks(model[0].weight)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 4, sparse=True)
        self.bag = nn.EmbeddingBag(7, 4, sparse=True, mode="sum")
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor, use_bag: bool = True, twice: bool = False) -> torch.Tensor:
        h = self.embed(tokens)
        if twice:  # two passes within a pass: the gradient of the embedding comes twice
            anchor = torch.ones((), requires_grad=True)
            for _ in range(2):
                h = h + checkpoint(lambda a: self.embed(tokens) * a, anchor, use_reentrant=True)
        if use_bag:
            h = h + self.bag(tokens.unsqueeze(1) % 7)
        return self.head(h)


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("case", ["plain", "unused", "twice"])
@ranks(3)
def test_sparse_gradients(case: str) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(Sparse(), **SMALL), Sparse()

    def loss(m: Sparse, r: int, s: int) -> torch.Tensor:
        use_bag = case != "unused" or (r == s % 3 and s != 1)
        return m(tokens(r, s), use_bag, case == "twice" and s > 1 and (r + s) % 2 == 0).square().sum()

    for step in range(5):
        model.zero_grad()
        loss(model, rank, step).backward()
        expected = average_gradients(reference, loss, step)
        for name, parameter in model.named_parameters():
            wanted = expected[name]
            if wanted is None:
                assert parameter.grad is None
                continue
            assert parameter.grad.is_sparse == wanted.is_sparse
            torch.testing.assert_close(parameter.grad.to_dense(), wanted.to_dense(), rtol=1e-4, atol=1e-4)


@ranks(2)
def test_sparse_gradients_add_up_and_are_kept() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(Sparse(), **SMALL), Sparse()
    loss = lambda m, r, s: m(tokens(r, s)).square().sum()
    with px.no_sync(model):
        loss(model, rank, 0).backward()
    loss(model, rank, 1).backward()
    loss(model, rank, 2).backward()
    total = average_gradients(reference, lambda m, r, s: sum(loss(m, r, i) for i in range(3)), 0)  # type: ignore[arg-type]
    torch.testing.assert_close(
        model.embed.weight.grad.to_dense(), total["embed.weight"].to_dense(), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(model.head.weight.grad, total["head.weight"], rtol=1e-4, atol=1e-4)


class SparseUnannounced(nn.Module):
    """Sparse gradients of a parameter that belongs to no embedding layer: dense memory is planned for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(11, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor, sparse: bool) -> torch.Tensor:
        return self.head(nn.functional.embedding(tokens, self.table, sparse=sparse))


@pytest.mark.parametrize("from_step", [0, 3])
@ranks(2)
def test_sparse_gradients_where_dense_ones_were_planned(from_step: int) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(SparseUnannounced(), **SMALL), SparseUnannounced()
    for step in range(6):
        loss = lambda m, r, s, sparse=False: m(tokens(r, s), sparse).square().sum()
        model.zero_grad()
        loss(model, rank, step, step >= from_step).backward()
        expected = average_gradients(reference, loss, step)
        torch.testing.assert_close(model.table.grad.to_dense(), expected["table"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.head.weight.grad, expected["head.weight"], rtol=1e-4, atol=1e-4)


class Mixed(nn.Module):
    """Every kind of parameter at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.single_precision = nn.Parameter(torch.randn(5, 3))
        self.double_precision = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.brain = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.half_precision = nn.Parameter(torch.randn(7).half())
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.fine_phase = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.no_brain = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        self.image = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.spread = nn.Parameter(torch.randn(8)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (self.single_precision * x).square().sum() * self.scalar + (self.turned * x).square().sum()
        total = total + (self.double_precision * x[:, 0]).square().sum().float()
        total = total + (self.brain * x.bfloat16()).float().square().sum()
        total = total + (self.half_precision.float() * x.sum()).square().sum()
        total = total + (self.phase * x[:, 0]).abs().square().sum()
        total = total + (self.fine_phase * x[0]).abs().square().sum().float()
        total = total + self.nothing.sum() + self.no_brain.float().sum()
        total = total + (self.image * x[:4, :, None, None]).square().sum() + (self.spread * x[:4, 0]).square().sum()
        return total


@pytest.mark.parametrize("size", [160, 1 << 20])
@ranks(3)
def test_every_kind_of_parameter(size: int) -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(Mixed(), bucket_bytes=size, first_bucket_bytes=64), Mixed()
    loss = lambda m, r, s: m(batch(r, s, width=3))
    for step in range(4):
        model.zero_grad()
        loss(model, rank, step).backward()
        expected = average_gradients(reference, loss, step)
        for name, parameter in model.named_parameters():
            loose = parameter.dtype in (torch.bfloat16, torch.float16)
            close = 2e-2 if loose else 1e-4
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.shape == parameter.shape
            text = lambda t, name=name: f"{name}: {t}"
            torch.testing.assert_close(parameter.grad, expected[name], rtol=close, atol=close, msg=text)
        assert model.image.grad.is_contiguous(memory_format=torch.channels_last)
        assert model.turned.grad.stride() == model.turned.stride()


@ranks(3)
def test_the_average_of_low_precision_gradients_is_not_biased() -> None:
    values = torch.linspace(1, 2, 256).bfloat16()
    model = nn.Linear(256, 1, bias=False).bfloat16()
    px.replicate(model)
    model(values).sum().backward()  # the same gradient on every rank: so is the average
    error = (model.weight.grad[0].float() - values.float()) / values.float()
    assert error.abs().max() < 2**-7
    assert error.mean().abs() < 2**-11


@ranks(2)
def test_channels_last_convolution() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)

    def loss(m: nn.Module, r: int, s: int) -> torch.Tensor:
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * s + r))
        return m(x.to(memory_format=torch.channels_last)).square().sum()

    model = px.replicate(net(), **SMALL)
    check_steps(model, net(), loss)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


@ranks(2)
def test_create_graph() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(4):
        model.zero_grad()
        plain_loss(model, rank, step).backward(create_graph=step != 1)
        assert_gradients(model, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_a_world_with_a_default_dtype_of_its_own() -> None:
    torch.set_default_dtype(torch.bfloat16)
    rank = dist.get_rank()
    model = px.replicate(nn.Sequential(*[nn.Linear(2, 1, bias=False) for _ in range(300)]))
    for _ in range(2):
        model.zero_grad()
        sum(layer(torch.ones(2)).sum() * (1 + rank) for layer in model[:299]).backward()  # type: ignore[union-attr]
        assert model[299].weight.grad is None
        assert torch.equal(model[298].weight.grad, torch.full((1, 2), 1.5))


@ranks(2)
def test_double_precision_is_exact_to_its_own_precision() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp().double(), **SMALL), mlp().double()
    loss = lambda m, r, s: m(batch(r, s).double()).square().sum()
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
        assert_gradients(model, average_gradients(reference, loss, step), rtol=1e-13, atol=1e-13)


@ranks(1)
def test_a_world_of_one() -> None:
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    check_steps(model, reference, plain_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    px.weight(model, 3.0)
    plain_loss(model, 0, 0).backward()
    optimizer.step()
