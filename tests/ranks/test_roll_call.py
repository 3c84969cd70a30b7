"""Gradients that are looked at in runs: on after a few regular steps, right when the order changes, and on again later.

DDP against torch's to the bit; `replicate` in float64 against one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Pair
from torch import nn
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.api.replicate import replica_of
from phalanx.reducer.reducer import Reducer
from phalanx.testing import run_ranks

everywhere = pytest.mark.parametrize("where", ["gloo 2", "gloo 3", "phalanx 2", "phalanx 3"])
on_both = pytest.mark.parametrize("where", ["gloo 2", "phalanx 3"])

WIDTH = 6
REGULAR = [0, 1, 2, 3, 4]
SMALL = {"bucket_bytes": 400, "first_bucket_bytes": 300}  # a layer or two each: a run ends with its bucket
COPY = {"bucket_cap_mb": 0.0003}
VIEW = {"bucket_cap_mb": 0.0003, "gradient_as_bucket_view": True}

Order = Callable[[int, int], Sequence[int]]
"""From a rank and a step to the layers, in the order in which they are called."""


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in REGULAR)
        self.head = nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, tokens: torch.Tensor, order: Sequence[int], checkpointed: Sequence[int] = ()) -> torch.Tensor:
        x = self.table(tokens).mean(1)
        for index in order:
            layer = self.layers[index]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if index in checkpointed else layer(x))
        return self.head(x)


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(100 * step + rank))


def reducer_of(model: nn.Module) -> Reducer:
    return model._engine if isinstance(model, px.DistributedDataParallel) else replica_of(model).reducer


def is_on(model: nn.Module) -> bool:
    return reducer_of(model).arrivals.roll is not None


def in_ranks(where: str, *bodies: Callable[[], None]) -> None:
    backend, world_size = where.split()
    run_ranks(one_after_another, int(world_size), bodies, backend=backend, timeout_s=50)


def one_after_another(bodies: Sequence[Callable[[], None]]) -> None:
    for body in bodies:
        body()


class Trial:
    """Our model and what it must agree with: torch's DDP, or for `replicate` the same in one process."""

    def __init__(self, face: str, **options: object) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.pair = None
        if face == "replicate":
            self.model: nn.Module = px.replicate(Layers(), **SMALL)
            self.reference: nn.Module = Layers()
        else:
            self.pair = Pair.of(Layers, **(COPY if face == "copy" else VIEW), **options)
            self.model, self.reference = self.pair.both()
        self.on: list[bool] = []

    @property
    def modules(self) -> tuple[Layers, Layers]:
        if self.pair is None:
            return self.model, self.reference  # type: ignore[return-value]
        return self.model.module, self.reference.module  # type: ignore[return-value]

    def backward(self, loss: Callable[[nn.Module, int], torch.Tensor], **options: bool) -> None:
        """`loss` of a model and a rank; one process runs those of all ranks. Options are for our pass."""
        loss(self.model, self.rank).backward(**options)
        if self.pair is not None:
            loss(self.reference, self.rank).backward()
        else:
            for rank in range(self.size):
                (loss(self.reference, rank) / self.size).backward()

    def compare(self, what: object) -> None:
        self.on.append(is_on(self.model))
        exact = self.pair is not None and self.size == 2  # of three, a group that averages rounds differently
        for (name, mine), other in zip(self.model.named_parameters(), self.reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{name} in {what}"
            if other.grad is not None:
                limits = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-10, "atol": 1e-12}
                torch.testing.assert_close(
                    mine.grad.detach().to_dense(),
                    other.grad.detach().to_dense(),
                    msg=lambda text, name=name: f"{name} in {what}: {text}",
                    **limits,
                )

    def zero(self, *, set_to_none: bool = True) -> None:
        for model in (self.model, self.reference):
            for parameter in model.parameters():
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()


FACES = ("replicate", "copy", "view")


# -- the order ---------------------------------------------------------------------------------------------------------


def order_changes() -> None:
    for face in FACES:
        trial = Trial(face)
        orders = [REGULAR, REGULAR[::-1], [2, 4, 0, 3, 1]]
        for step in range(18):
            order = orders[step // 6 % 3]
            trial.zero()
            trial.backward(lambda m, rank, order=order, step=step: m(tokens(rank, step), order).square().sum())
            trial.compare(f"step {step} of {face}")
        assert all(trial.on[4:6]), f"{face}: not on after four regular steps: {trial.on}"
        assert not trial.on[6], f"{face}: the order was lost: {trial.on}"
        assert trial.on[11] and trial.on[17], f"{face}: not on again: {trial.on}"


def order_changes_in_every_step() -> None:
    for face in FACES:
        trial = Trial(face)
        for step in range(6):

            def loss(m: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                made = torch.Generator().manual_seed(10 * step + rank)
                return m(tokens(rank, step), torch.randperm(5, generator=made).tolist()).square().sum()

            trial.zero()
            trial.backward(loss)
            trial.compare(f"step {step} of {face}")


def a_layer_is_skipped() -> None:
    """Now and then, and by one rank or by all."""
    for face in FACES:
        trial = Trial(face, **({} if face == "replicate" else {"find_unused_parameters": True}))
        for step in range(11):

            def loss(m: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                skips = {5: [rank], 6: [2], 9: [4] if rank == 0 else []}.get(step, [])
                return m(tokens(rank, step), [i for i in REGULAR if i not in skips]).square().sum()

            trial.zero()
            trial.backward(loss)
            trial.compare(f"step {step} of {face}")
        assert trial.on[4], f"{face}: {trial.on}"


def a_layer_comes_twice() -> None:
    """From autograd's own count: once, however often it is used; under reentrant checkpointing once for each."""
    for face in FACES:
        trial = Trial(face)
        for step in range(10):
            twice = face == "replicate"  # torch's contract has no place for it

            def loss(m: nn.Module, rank: int, step: int = step, twice: bool = twice) -> torch.Tensor:
                order = [0, 1, 2, 1, 3, 4] if step in (5, 6, 8) else REGULAR
                checkpointed = ([1] if twice else [3]) if 5 <= step < 7 or step == 8 else []
                return m(tokens(rank, step), order, checkpointed).square().sum()

            trial.zero()
            trial.backward(loss)
            trial.compare(f"step {step} of {face}")
        assert trial.on[4], f"{face}: {trial.on}"


@everywhere
def test_the_order_changes(where: str) -> None:
    in_ranks(where, order_changes, order_changes_in_every_step, a_layer_is_skipped, a_layer_comes_twice)


# -- gradients that are there before -----------------------------------------------------------------------------------


def accumulated() -> None:
    """With what earlier passes kept, in gradients that lie in buckets (zeroed in place) and in others."""
    for face in FACES:
        trial = Trial(face)
        for step in range(8):
            trial.zero(set_to_none=step % 2 == 0)
            for part in range(2):
                order = REGULAR[::-1] if step >= 6 and part == 1 else REGULAR

                def loss(m: nn.Module, rank: int, at: int = 10 * step + part, order: list[int] = order) -> torch.Tensor:
                    return m(tokens(rank, at), order).square().sum()

                if part == 1:
                    trial.backward(loss)
                elif face == "replicate":
                    with px.no_sync(trial.model):
                        trial.backward(loss)
                else:
                    with trial.model.no_sync(), trial.reference.no_sync():  # type: ignore[operator]
                        trial.backward(loss)
            trial.compare(f"step {step} of {face}")
        assert trial.on[5], f"{face}: {trial.on}"


def zeroed_in_place() -> None:
    """Gradients of one bucket share its memory, and must not share what tells that one was added to."""
    for face in FACES:
        trial = Trial(face)
        for step in range(8):
            trial.zero(set_to_none=False)
            order = REGULAR if step < 6 else [3, 0, 4, 1, 2]
            trial.backward(lambda m, rank, order=order, step=step: m(tokens(rank, step), order).square().sum())
            trial.compare(f"step {step} of {face}")
        assert trial.on[5], f"{face}: {trial.on}"


def kept_without_zeroing() -> None:
    """Gradients add up over steps; torch's DDP averages the sum, as one process adds averages."""
    for face in FACES:
        trial = Trial(face)
        for step in range(8):
            if step % 3 == 0:
                trial.zero(set_to_none=step != 6)
            order = REGULAR[::-1] if step in (7, 8) else REGULAR
            trial.backward(lambda m, rank, order=order, step=step: m(tokens(rank, step), order).square().sum())
            trial.compare(f"step {step} of {face}")


def with_graphs() -> None:
    """Under create_graph gradients are new tensors with graphs of their own. torch's DDP refuses it: there without."""
    for face in FACES:
        trial = Trial(face)
        for step in range(7):
            trial.zero()
            trial.backward(
                lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum(), create_graph=step == 5
            )
            trial.compare(f"step {step} of {face}")


@everywhere
def test_gradients_that_are_there_before(where: str) -> None:
    in_ranks(where, accumulated, zeroed_in_place, kept_without_zeroing, with_graphs)


# -- other changes -----------------------------------------------------------------------------------------------------


def sparse_later() -> None:
    """A dense embedding that begins to give sparse gradients."""
    trial = Trial("replicate")
    for step in range(10):
        for module in trial.modules:
            module.table.sparse = step >= 6
        trial.zero()
        trial.backward(lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum())
        trial.compare(f"step {step}")
    assert trial.on[5]


def frozen() -> None:
    for face in FACES:
        trial = Trial(face, **({} if face == "replicate" else {"find_unused_parameters": True}))
        for step in range(18):
            for module in trial.modules:
                module.layers[2].requires_grad_(not 6 <= step < 12)
            trial.zero()
            trial.backward(lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum())
            trial.compare(f"step {step} of {face}")
        assert trial.on[5] and trial.on[-1], f"{face}: {trial.on}"


def the_first_is_frozen() -> None:
    """The one whose own hook begins a pass."""
    trial = Trial("replicate")
    for step in range(18):
        for module in trial.modules:
            module.head.requires_grad_(not 6 <= step < 12)
        trial.zero()
        trial.backward(lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum())
        trial.compare(f"step {step}")
    assert trial.on[5] and trial.on[-1], trial.on


def a_pass_breaks_off() -> None:
    """A rank that raises in the middle of a run; the others are told, and all train on."""

    def fail(_: torch.Tensor) -> None:
        raise OSError("on purpose")

    trial = Trial("replicate")
    for step in range(12):
        trial.zero()
        if step == 6:
            try:
                model = trial.modules[0]
                hidden = model.table(tokens(trial.rank, step)).mean(1)
                for index in REGULAR:
                    hidden = torch.tanh(model.layers[index](hidden))
                    if index == 2 and trial.rank == 0:
                        hidden.register_hook(fail)
                model.head(hidden).square().sum().backward()
            except (OSError, px.errors.PeerFailedError):
                torch.zeros((), requires_grad=True).backward()
                continue
            raise AssertionError("nobody was told")
        trial.backward(lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum())
        trial.compare(f"step {step}")


@on_both
def test_other_changes(where: str) -> None:
    in_ranks(where, sparse_later, frozen, the_first_is_frozen, a_pass_breaks_off)


# -- hooks of the user's -----------------------------------------------------------------------------------------------


def hooked(*, before: bool, late: int = 0) -> None:
    """A user's hook sees the same in every step, whether gradients are looked at in runs or one by one."""
    for face in FACES:
        rank = dist.get_rank()
        seen: list[list[bool]] = []
        module = Layers()
        watched = [module.layers[1].weight, module.layers[3].bias, module.head.weight]

        def look(parameter: torch.Tensor, seen: list[list[bool]] = seen) -> None:
            seen[-1].append(parameter.grad is not None)

        def register(watched: Sequence[torch.Tensor] = watched, look: Callable[[torch.Tensor], None] = look) -> None:
            for parameter in watched:
                parameter.register_post_accumulate_grad_hook(look)

        if before:
            register()
        model = (
            px.replicate(module, **SMALL)
            if face == "replicate"
            else px.DistributedDataParallel(module, **(COPY if face == "copy" else VIEW))
        )
        for step in range(12):
            if not before and step == late:
                register()
            seen.append([])
            module.zero_grad()
            model(tokens(rank, step), REGULAR).square().sum().backward()
        assert is_on(model)
        told = [one for one in seen if one]
        assert len(told) == 12 - (0 if before else late)
        assert all(len(one) == 3 for one in told)
        assert len({tuple(one) for one in told}) == 1, f"{face}, before={before}: not the same in every step: {seen}"


def hooks_from_before() -> None:
    hooked(before=True)


def hooks_from_after() -> None:
    hooked(before=False)


def hooks_from_mid_training() -> None:
    hooked(before=False, late=8)


def hooks_that_change_gradients() -> None:
    """Registered before: what it makes of a gradient is what is averaged, in every step alike."""
    trial = Trial("replicate")
    px.unreplicate(trial.model)

    def double(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(2)  # type: ignore[union-attr]

    for module in trial.modules:
        for parameter in (module.layers[1].weight, module.layers[3].bias):
            if module is trial.reference:
                parameter.register_hook(lambda gradient: gradient * 2)  # before it is added to the other ranks'
            else:
                parameter.register_post_accumulate_grad_hook(double)
    px.replicate(trial.model, **SMALL)
    for step in range(9):
        trial.zero()
        trial.backward(lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum())
        trial.compare(f"step {step}")
    assert trial.on[-1]


@on_both
def test_hooks_of_the_users(where: str) -> None:
    in_ranks(where, hooks_from_before, hooks_that_change_gradients, hooks_from_after, hooks_from_mid_training)
