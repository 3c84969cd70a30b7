"""`px.join` with what else a loop may do: accumulation, buffers, several modules, hooks, a block of one's own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.ranks.replicas import SMALL, equal_on_all_ranks, mlp
from tests.ranks.uneven import CLOSE, assert_same_state, shares, sized_shares, train_alone
from torch import nn

import phalanx as px
from phalanx.testing import ranks, run_ranks

SGD = lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
BACKENDS = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


@BACKENDS
@pytest.mark.parametrize("sizes", [[[2, 3, 1, 2, 4, 3], [1] * 10], [[4, 1, 2], [2, 2, 2, 2], []], [[1, 2, 3]] * 2])
def test_accumulation_keeps_what_a_rank_had_left_over(sizes: list[list[int]], backend: str) -> None:
    """Rank 0 ends in the middle of a group of four: its batches count in the step that the others complete."""
    run_ranks(_accumulates, len(sizes), sizes, backend=backend)


def _accumulates(sizes: list[list[int]]) -> None:
    rank = dist.get_rank()
    data = sized_shares(sizes)
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = SGD(model)
    with px.accumulate(model, 4):
        for number, batch in enumerate(px.join(model, optimizer).over(data[rank]), start=1):
            px.weight(model, len(batch))
            model(batch).square().mean().backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    left_over = max(map(len, sizes)) % 4
    if left_over:
        optimizer.step()
    assert_same_state(model, train_alone(mlp().double(), data, SGD, per=4), **CLOSE)
    assert all(equal_on_all_ranks(parameter) for parameter in model.parameters())


@ranks(2)
def test_no_sync_inside() -> None:
    data = sized_shares([[2, 3], [1, 4, 5, 2, 2, 3]])
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = SGD(model)
    for number, batch in enumerate(px.join(model, optimizer).over(data[dist.get_rank()])):
        px.weight(model, len(batch))
        if number % 2 == 0:
            optimizer.zero_grad()
            with px.no_sync(model):
                model(batch).square().mean().backward()
        else:
            model(batch).square().mean().backward()
            optimizer.step()
    assert_same_state(model, train_alone(mlp().double(), data, SGD, per=2), **CLOSE)


class Counted(nn.Module):
    """A layer with buffers that tell whose batches they have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = mlp().double()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.sum().detach()
        self.count = self.count + 1
        return self.layer(x)


@BACKENDS
@pytest.mark.parametrize("policy", ["rank0", "mean", "none"])
def test_buffers_are_those_of_ranks_with_data(policy: str, backend: str) -> None:
    run_ranks(_buffers, 3, policy, backend=backend)


def _buffers(policy: str) -> None:
    counts = [1, 3, 4]
    data = shares(counts)
    model = px.replicate(Counted(), buffers=policy, **SMALL)
    for batch in px.join(model).over(data[dist.get_rank()]):
        model.zero_grad()
        model(batch).square().mean().backward()
    seen, total = [0.0] * 3, 0
    for step in range(4):
        at_work = [rank for rank in range(3) if counts[rank] > step]
        for rank in at_work:
            seen[rank] += data[rank][step].sum().item()
        if policy != "none":
            value = sum(seen[rank] for rank in at_work) / len(at_work) if policy == "mean" else seen[at_work[0]]
            seen = [value] * 3
        total += 1
    # At the end everyone has those of a rank that went to the end.
    torch.testing.assert_close(model.seen, torch.tensor([seen[2]], dtype=torch.float64), **CLOSE)
    assert model.count.item() == total


@BACKENDS
def test_two_modules_in_the_order_of_the_loop(backend: str) -> None:
    run_ranks(_two_modules, 2, backend=backend)


def _two_modules() -> None:
    """The critic steps twice a batch, before the other; the order in px.join is another one."""
    rank, data = dist.get_rank(), shares([1, 4])

    def train(maker: nn.Module, critic: nn.Module, batches: object, joined: bool) -> None:
        optimizers = SGD(maker), SGD(critic)
        if joined:
            batches = px.join(maker, critic, *optimizers).over(batches)  # type: ignore[arg-type]
        for batch in batches:  # type: ignore[attr-defined]
            for _ in range(2):
                optimizers[1].zero_grad()
                critic(maker(batch).detach().repeat(1, 3)).square().mean().backward()
                optimizers[1].step()
            optimizers[0].zero_grad()
            maker(batch).square().mean().backward()
            optimizers[0].step()

    maker, critic = px.replicate(mlp().double(), **SMALL), px.replicate(mlp(1).double())
    train(maker, critic, data[rank], joined=True)
    alone = mlp().double(), mlp(1).double()
    train(*alone, [torch.cat([data[0][0], data[1][0]]), *data[1][1:]], joined=False)
    assert_same_state(maker, alone[0], **CLOSE)
    assert_same_state(critic, alone[1], **CLOSE)


@BACKENDS
def test_a_block_around_a_loop_of_ones_own(backend: str) -> None:
    run_ranks(_block, 3, backend=backend)


def _block() -> None:
    for counts in ([2, 4, 3], [0, 2, 2], [2, 2, 2]):
        data = shares(counts)
        model = px.replicate(mlp().double(), **SMALL)
        optimizer = SGD(model)
        with px.join(model, optimizer):
            for batch in data[dist.get_rank()]:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        assert_same_state(model, train_alone(mlp().double(), data, SGD), **CLOSE)


@pytest.mark.parametrize("own_loop", [True, False])
@ranks(2)
def test_break_in_a_block_is_an_end_like_any_other(own_loop: bool) -> None:
    """Of a rank that leaves alone, in a loop of its own; and in ours, when the other has run out before."""
    ends = [2, 4] if own_loop else [2, 3]
    data = shares([6, 4] if own_loop else [2, 5])
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = SGD(model)
    rank = dist.get_rank()
    with px.join(model, optimizer) as joined:
        for number, batch in enumerate(data[rank] if own_loop else joined.over(data[rank])):
            if number == ends[rank]:
                break
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    cut = [share[:end] for share, end in zip(data, ends, strict=True)]
    assert_same_state(model, train_alone(mlp().double(), cut, SGD), **CLOSE)


@ranks(2)
def test_break_on_all_ranks_while_all_have_data() -> None:
    data = shares([6, 4])
    model = px.replicate(mlp().double(), **SMALL)
    for _ in range(2):
        for number, batch in enumerate(px.join(model).over(data[dist.get_rank()])):
            model.zero_grad()
            model(batch).square().mean().backward()
            if number == 1:
                break
    assert px.step_stats(model).steps == 4


@ranks(2)
def test_several_epochs_in_one_block() -> None:
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = SGD(model)
    data = shares([2, 3])
    with px.join(model, optimizer) as joined:
        for _ in range(3):
            for batch in joined.over(data[dist.get_rank()]):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    whole = [share * 3 for share in (data[0] + [data[0][0][:0]], data[1])]  # the third step of each has no rank 0
    assert_same_state(model, train_alone(mlp().double(), whole, SGD), **CLOSE)


@ranks(3)
def test_a_parameter_that_only_a_rank_with_less_data_uses() -> None:
    rank = dist.get_rank()
    data = shares([2, 3, 1])
    model = px.replicate(mlp().double(), **SMALL)
    extra = "4.bias"
    for number, batch in enumerate(px.join(model).over(data[rank])):
        model.zero_grad()
        hidden = model[:4](batch)
        (model[4](hidden) if rank == 0 else hidden).square().mean().backward()
        grads = dict(model.named_parameters())
        assert (grads[extra].grad is None) == (number == 2)


@BACKENDS
def test_with_a_communication_hook(backend: str) -> None:
    run_ranks(_hooked, 3, backend=backend)


def _hooked() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    data = shares([2, 4, 1])
    model = px.replicate(mlp().double(), **SMALL)
    px.register_hook(model, default_hooks.allreduce_hook)
    optimizer = SGD(model)
    for batch in px.join(model, optimizer).over(data[dist.get_rank()]):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    assert_same_state(model, train_alone(mlp().double(), data, SGD), **CLOSE)


@ranks(2)
def test_nothing_is_sent_for_it_while_all_have_data() -> None:
    """Collectives of an even loop, counted by the group: as many with px.join as without."""
    data = shares([4, 4])[dist.get_rank()]

    def collectives(joined: bool) -> int:
        model = px.replicate(mlp().double(), **SMALL)
        batches = px.join(model).over(data) if joined else data
        for batch in batches:
            model.zero_grad()
            model(batch).square().mean().backward()
        return len(calls)

    calls: list[str] = []
    for name in ("allreduce", "allgather", "broadcast"):
        _record_calls(dist.ProcessGroup, name, calls)
    with_join = collectives(joined=True)
    calls.clear()
    assert with_join == collectives(joined=False) > 0


def _record_calls(kind: type, name: str, calls: list[str]) -> None:
    original = getattr(kind, name)

    def recorded(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(kind, name, recorded)  # the rank ends with the test


@ranks(2)
def test_an_optimizer_that_was_not_named_is_warned_of() -> None:
    model = px.replicate(mlp().double(), **SMALL)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.warns(UserWarning, match=r"Adam .*px.join\(model, optimizer\)"):  # noqa: PT031
        for batch in px.join(model).over(shares([2, 3])[dist.get_rank()]):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
