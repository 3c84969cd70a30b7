"""Several forwards, several backwards, and parameters that are used in other ways than by one call of `forward`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.ranks.replicas import (
    SMALL,
    assert_gradients,
    average_gradients,
    batch,
    check_steps,
    mlp,
    plain_loss,
)
from torch import nn

import phalanx as px
from phalanx.testing import ranks


@ranks(2)
def test_several_forwards_before_one_backward() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        outputs = [m(batch(rank, 10 * step + i)) for i in range(3)]
        return sum((o.square().sum() for o in outputs), torch.zeros(()))

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_a_forward_whose_output_is_never_used() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        if rank == 0:
            m(batch(rank, step + 1))
        return plain_loss(m, rank, step)

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_several_backwards_add_up_to_the_sum_of_the_averages() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        model.zero_grad()
        losses = [plain_loss(model, rank, 10 * step + i) for i in range(3)]  # all forwards first
        for i in (2, 0, 1):
            losses[i].backward()
        both = lambda m, r, s: sum((plain_loss(m, r, 10 * s + i) for i in range(3)), torch.zeros(()))
        assert_gradients(model, average_gradients(reference, both, step))


@ranks(2)
def test_backwards_that_each_reach_another_part() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()

    def part(m: nn.Sequential, rank: int, step: int, which: int) -> torch.Tensor:
        h = batch(rank, step, width=6 if which == 0 else 8)
        return m[which](h).square().sum()

    for step in range(4):
        model.zero_grad()
        for which in (0, 4, 2):
            part(model, rank, step, which).backward()
        whole = lambda m, r, s: sum((part(m, r, s, which) for which in (0, 2, 4)), torch.zeros(()))
        assert_gradients(model, average_gradients(reference, whole, step))


@ranks(2)
def test_retain_graph() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        model.zero_grad()
        loss = plain_loss(model, rank, step)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        assert_gradients(model, average_gradients(reference, lambda m, r, s: 3 * plain_loss(m, r, s), step))


@ranks(2)
def test_gan_alternation_equals_one_process() -> None:
    rank = dist.get_rank()

    def networks() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), nn.Sequential(
            nn.Linear(6, 4), nn.Linear(4, 1)
        )

    def optimizers(g: nn.Module, d: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return torch.optim.SGD(g.parameters(), lr=0.05), torch.optim.SGD(d.parameters(), lr=0.05)

    def d_loss(g: nn.Module, d: nn.Module, r: int, s: int) -> torch.Tensor:
        return d(batch(r, s)).square().mean() - d(g(batch(r, s + 50)).detach()).mean()

    def g_loss(g: nn.Module, d: nn.Module, r: int, s: int) -> torch.Tensor:
        return d(g(batch(r, s + 70))).mean()

    g, d = networks()
    px.replicate(g, **SMALL), px.replicate(d, **SMALL)
    g_step, d_step = optimizers(g, d)
    one_g, one_d = networks()
    one_g_step, one_d_step = optimizers(one_g, one_d)
    for step in range(4):
        freezes = step % 2 == 1  # some programs freeze the critic while the generator learns
        d_step.zero_grad()
        d_loss(g, d, rank, step).backward()
        d_step.step()
        g_step.zero_grad()
        d.requires_grad_(not freezes)
        g_loss(g, d, rank, step).backward()
        g_step.step()
        d.requires_grad_(True)

        one_d_step.zero_grad()
        (sum(d_loss(one_g, one_d, r, step) for r in range(2)) / 2).backward()
        one_d_step.step()
        one_g_step.zero_grad()
        (sum(g_loss(one_g, one_d, r, step) for r in range(2)) / 2).backward()
        one_g_step.step()
        ours, wanted = [*g.parameters(), *d.parameters()], [*one_g.parameters(), *one_d.parameters()]
        for mine, theirs in zip(ours, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)


@ranks(2)
def test_a_layer_used_twice() -> None:
    def loss(m: nn.Sequential, rank: int, step: int) -> torch.Tensor:
        h = m[0](batch(rank, step))
        return m[4](m[2](m[2](h))).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(tokens)).sum()


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(100 * step + rank))


@ranks(2)
def test_tied_weights() -> None:
    check_steps(px.replicate(Tied(), **SMALL), Tied(), lambda m, r, s: m(tokens(r, s)).square().sum())


@ranks(2)
def test_parameters_used_outside_forward() -> None:
    def loss(m: Tied, rank: int, step: int) -> torch.Tensor:
        decay = m.body.weight.square().sum() + m.embed.weight.abs().sum()
        return (m(tokens(rank, step)) * m.temperature).square().sum() + decay * (1 + rank)

    check_steps(px.replicate(Tied(), **SMALL), Tied(), loss)


@ranks(2)
def test_a_method_other_than_forward_and_a_submodule() -> None:
    def loss(m: Tied, rank: int, step: int) -> torch.Tensor:
        return m.score(tokens(rank, step)) + m.body(batch(rank, step, width=4)).square().sum()

    check_steps(px.replicate(Tied(), **SMALL), Tied(), loss)


@ranks(2)
def test_functional_call_with_the_modules_own_parameters() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        doubled = {name: 2 * p for name, p in m.named_parameters()}
        return torch.func.functional_call(m, doubled, (batch(rank, step),)).square().sum()

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_autograd_grad_synchronises_nothing_and_disturbs_nothing() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    if rank == 0:  # one rank alone may
        torch.autograd.grad(plain_loss(model, rank, 9), list(model.parameters()))
    assert px.step_stats(model).steps == 0
    check_steps(model, reference, plain_loss)


@ranks(2)
def test_gradient_penalty_through_autograd_grad() -> None:
    def loss(m: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return slope.square().sum() + plain_loss(m, rank, step)

    check_steps(px.replicate(mlp(), **SMALL), mlp(), loss)


@ranks(2)
def test_backward_for_some_inputs_only() -> None:
    rank = dist.get_rank()
    model, reference = px.replicate(mlp(), **SMALL), mlp()
    for step in range(3):
        model.zero_grad()
        reference.zero_grad()
        plain_loss(model, rank, step).backward(inputs=[model[0].weight, model[4].bias])
        for r in range(2):
            (plain_loss(reference, r, step) / 2).backward(inputs=[reference[0].weight, reference[4].bias])
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad)
