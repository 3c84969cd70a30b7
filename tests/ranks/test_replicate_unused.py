"""Parameters without a gradient in a step: on all ranks or on some, changing every step, with no flag."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, assert_gradients, average_gradients, batch, check_steps, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx.testing import ranks


class Branches(nn.Module):
    """As many branches as asked for behind a common layer; which one is used is said by the caller."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(count))

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        h = self.common(x)
        return sum((self.branches[i](h) for i in which), h.sum())


@ranks(2)
def test_the_same_on_every_rank_keeps_none() -> None:
    model = px.replicate(Branches(), **SMALL)
    check_steps(model, Branches(), lambda m, r, s: m(batch(r, s), [0, 2]).square().sum())
    assert model.branches[1].weight.grad is None


@ranks(3)
def test_different_on_each_rank_and_changing_every_step() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        which = [[rank], [0, rank], [], [3], [rank, 3], [1], [(rank + step) % 4]][step % 7]
        return m(batch(rank, step), which).square().sum()

    check_steps(px.replicate(Branches(), **SMALL), Branches(), loss, steps=14)


@ranks(2)
def test_one_rank_uses_what_the_other_never_does() -> None:
    check_steps(
        px.replicate(Branches(), **SMALL), Branches(), lambda m, r, s: m(batch(r, s), [r]).square().sum(), steps=6
    )


@ranks(2)
def test_a_parameter_that_comes_back_after_it_was_predicted_unused() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        return m(batch(rank, step), [0, 1, 2, 3] if step in (3, 4, 7) and rank == 0 else [1]).square().sum()

    check_steps(px.replicate(Branches(), **SMALL), Branches(), loss, steps=9)


@ranks(2)
def test_an_optimizer_leaves_what_nobody_used_alone() -> None:
    model = px.replicate(Branches(), **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    before = model.branches[3].weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        model(batch(dist.get_rank(), step), [0, 1]).square().sum().backward()
        optimizer.step()
    assert torch.equal(model.branches[3].weight, before)
    assert model.branches[3].weight not in optimizer.state


@ranks(2)
def test_a_rank_that_skips_the_module_takes_part_when_asked() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor | None:
        return None if (rank + step) % 2 else plain_loss(m, rank, step)

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_a_rank_that_skips_the_module_takes_part_when_its_optimizer_steps() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)

    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor | None:
        return None if rank == 1 and step in (0, 2) else plain_loss(m, rank, step)

    for step, set_to_none in enumerate([True, True, True, False, False]):
        optimizer.zero_grad(set_to_none=set_to_none)
        value = loss(model, rank, step)
        if value is not None:
            value.backward()
        optimizer.step()
        average_gradients(reference, loss, step)
        plain.step()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@ranks(2)
def test_two_modules_in_one_backward_with_a_different_unused_parameter_on_each_rank() -> None:
    rank = dist.get_rank()
    first, second = px.replicate(Branches(), **SMALL), px.replicate(Branches(), **SMALL)
    twins = (Branches(), Branches())

    def loss(a: nn.Module, b: nn.Module, rank: int, step: int) -> torch.Tensor:
        mine, other = ([0, 1], [2]) if (rank + step) % 2 else ([3], [1, 2])
        parts = [a(batch(rank, step), mine).square().sum(), b(batch(rank, step), other).square().sum()]
        return sum(parts if rank else reversed(parts), torch.zeros(()))

    for step in range(6):
        first.zero_grad()
        second.zero_grad()
        loss(first, second, rank, step).backward()
        for twin in twins:
            twin.zero_grad()
        (sum(loss(*twins, r, step) for r in range(2)) / 2).backward()
        for model, twin in zip((first, second), twins, strict=True):
            for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad)


@ranks(2)
def test_a_kept_gradient_of_an_unused_parameter_stays_to_the_bit() -> None:
    rank = dist.get_rank()
    model = px.replicate(Branches(), **SMALL)
    model(batch(rank), [0, 1, 2, 3]).square().sum().backward()
    kept = model.branches[2].weight.grad.clone()
    for step in range(1, 5):
        model.common.zero_grad()
        model(batch(rank, step), [0]).square().sum().backward()
        assert torch.equal(model.branches[2].weight.grad, kept)


@ranks(2)
def test_it_is_said_once_by_name() -> None:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger = logging.getLogger("phalanx")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    model = px.replicate(Branches(), **SMALL)
    for step in range(3):
        model(batch(dist.get_rank(), step), [0]).square().sum().backward()
    told = [text for text in said if "branches.3.weight" in text]
    assert len(told) == (1 if dist.get_rank() == 0 else 0), said


@ranks(4)
def test_four_ranks_each_with_a_branch_of_its_own() -> None:
    model, reference = px.replicate(Branches(), **SMALL), Branches()
    for step in range(3):
        model.zero_grad()
        model(batch(dist.get_rank(), step), [dist.get_rank()]).square().sum().backward()
        expected = average_gradients(reference, lambda m, r, s: m(batch(r, s), [r]).square().sum(), step)
        assert_gradients(model, expected)


@ranks(2)
def test_a_dense_embedding_that_comes_late_or_lies_there_with_a_sparse_gradient() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    table, head = nn.Embedding(5, 3).double(), nn.Linear(3, 2).double()
    model = px.replicate(nn.ModuleList([table, head]))
    x = torch.ones(2, 3, dtype=torch.float64)

    def loss(of_rank: int, *, used: bool) -> torch.Tensor:
        return head(table(torch.tensor([of_rank, 2])) if used else x).square().sum()

    for step in range(6):
        model.zero_grad()
        if step == 4:  # expected not to come, and sparse when it does
            table.sparse = True
        expected = sum(torch.autograd.grad(loss(r, used=True), table.weight)[0].to_dense() for r in range(2)) / 2
        loss(rank, used=step >= 4).backward()
        if step >= 4:
            torch.testing.assert_close(table.weight.grad, expected)
    old = torch.sparse_coo_tensor([[1]], torch.ones(1, 3, dtype=torch.float64), (5, 3))
    model.zero_grad()
    if rank == 1:
        table.weight.grad = old
    theirs = torch.autograd.grad(loss(0, used=True), table.weight)[0].to_dense()
    loss(rank, used=rank == 0).backward()
    torch.testing.assert_close(table.weight.grad, (theirs + old.to_dense()) / 2)
