"""Gradients that are looked at in runs: on after a few regular steps, right when the order changes, and on again later.

DDP against torch's to the bit; `replicate` in float64 against one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Pair
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.api.replica import replica_of
from phalanx.errors import ReducerStateError
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


class Copies(TorchDispatchMode):
    """How many tensors are copied by fused copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._foreach_copy_.default:
            self.count += len(args[0])
        return func(*args, **(kwargs or {}))


def no_copy_of_what_lies_there() -> None:
    """A gradient that autograd has added up in its bucket is not copied into it; another one in the same run is."""
    for face, count in (("replicate", 1), ("view", 1), ("copy", 2 * len(list(Layers().parameters())))):
        trial = Trial(face)
        for step in range(8):
            trial.zero(set_to_none=False)
            if step > 5:
                for module in trial.modules:
                    module.layers[step % 5].weight.grad = None  # not the first of its run
            copies = Copies()
            with copies:
                trial.backward(lambda m, rank, step=step: m(tokens(rank, step), REGULAR).square().sum())
            trial.compare(f"step {step} of {face}")
        assert trial.on[5], f"{face}: {trial.on}"
        assert copies.count == count, f"{face}: {copies.count} copied"


def a_sparse_one_beside_one_that_lies_there() -> None:
    """A run that cannot be copied, of which a large gradient was added up in its bucket: that one is averaged once."""
    torch.manual_seed(0)
    net, table = nn.Linear(400, 400).double(), nn.Parameter(torch.ones(7, 400, dtype=torch.float64))
    model = px.replicate(nn.ParameterDict({"weight": net.weight, "bias": net.bias, "table": table}))

    def loss(rank: int, step: int, sparse: bool) -> torch.Tensor:
        x = torch.full((2, 400), 0.01 * (rank + 1) * (step + 1), dtype=torch.float64)
        return (net(x) * nn.functional.embedding(tokens(rank, step)[:2, 0], table, sparse=sparse)).sum()

    rank, size, parameters = dist.get_rank(), dist.get_world_size(), [net.weight, net.bias, table]
    for step in range(9):
        total = torch.stack([loss(of, step, False) for of in range(size)]).mean()
        expected = torch.autograd.grad(total, parameters)
        for parameter in parameters:
            if parameter is table or step < 6:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        loss(rank, step, sparse=step == 7).backward()
        for mine, wanted in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine.grad.to_dense(), wanted)
        if step == 6:
            assert is_on(model)


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
    in_ranks(
        where,
        accumulated,
        zeroed_in_place,
        no_copy_of_what_lies_there,
        a_sparse_one_beside_one_that_lies_there,
        kept_without_zeroing,
        with_graphs,
    )


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
    """The one that begins a pass."""
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


def cast_after_accumulation() -> None:
    """Buckets are laid out anew when a pass begins, with one that is a run by itself."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 600, bias=False))

    rank, size = dist.get_rank(), dist.get_world_size()
    for face in FACES:
        net, plain = make(), make()
        model = px.replicate(net) if face == "replicate" else px.DistributedDataParallel(net, **OWN_BUCKET[face])
        for step in range(8):
            if step == 6:
                assert is_on(model)
                model.double(), plain.double()
            batches = [torch.full((2, 8), 1.0 + step + other, dtype=net[0].weight.dtype) for other in range(size)]
            model.zero_grad(), plain.zero_grad()
            for keeps in (True, False):
                with (px.no_sync(net) if face == "replicate" else model.no_sync()) if keeps else nullcontext():
                    model(batches[rank]).mean().backward()
                (sum(plain(one).mean() for one in batches) / size).backward()
            for (name, mine), other in zip(net.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(
                    mine.grad, other.grad, msg=lambda text, at=(name, step, face): f"{at}: {text}"
                )


OWN_BUCKET: dict[str, dict[str, bool]] = {"copy": {}, "view": {"gradient_as_bucket_view": True}}


def one_is_taken_away() -> None:
    """By a hook within the pass, before its run is over."""
    rank = dist.get_rank()
    for face in FACES:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        options = {"find_unused_parameters": True, **OWN_BUCKET.get(face, {})}
        model = px.replicate(net) if face == "replicate" else px.DistributedDataParallel(net, **options)
        for step in range(9):
            hook = None
            model.zero_grad()
            if step == 6:
                assert is_on(model)
                hook = net[2].register_full_backward_hook(lambda *_, net=net: net[4].zero_grad())
            model(torch.full((2, 6), 1.0 + rank, dtype=torch.float64)).square().sum().backward()
            gone = [name for name, parameter in net.named_parameters() if parameter.grad is None]
            assert gone == (["4.weight", "4.bias"] if step == 6 else []), f"{face}, step {step}: {gone}"
            if hook is not None:
                hook.remove()


@on_both
def test_other_changes(where: str) -> None:
    in_ranks(where, sparse_later, frozen, the_first_is_frozen, a_pass_breaks_off)


@on_both
def test_changes_within_a_pass(where: str) -> None:
    in_ranks(where, cast_after_accumulation, one_is_taken_away)


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


# -- one that comes again, in the place of another ---------------------------------------------------------------------


class Uses(nn.Module):
    """Five parameters, used as often and in the order that is asked for, each use a pass of its own.

    They come as a, b, c, d and e: the first two fill a bucket, and so are a run, and the other three another.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, length in (("a", 20), ("b", 20), ("c", 16), ("d", 16), ("e", 16)):
            value = torch.rand(length, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value / value.sum()))

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        for name in names:
            weight = self.get_parameter(name)
            x = checkpoint(lambda t, weight=weight: t * weight.square().sum(), x, use_reentrant=True)
        return x


def one_comes_again() -> None:
    """Used twice while another is not used at all: as many arrivals as ever, and still not the same."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def batch(of: int) -> torch.Tensor:
        return torch.full((3,), 1.0 + of, dtype=torch.float64, requires_grad=True)

    for names, who in (("aa", "a"), ("aba", "a"), ("bba", "b"), ("bbca", "b"), ("ccba", "c"), ("cca", "c")):
        for options in (COPY, VIEW):
            model = px.DistributedDataParallel(Uses(), find_unused_parameters=True, **options)
            for _ in range(6):
                model.zero_grad()
                model(batch(rank), "edcba").sum().backward()
            assert is_on(model)
            model.zero_grad()
            with pytest.raises(ReducerStateError, match="ready only once") as raised:
                model(batch(rank), names).sum().backward()
            assert who in raised.value.parameters, (names, raised.value.parameters)
            model.zero_grad()
            model(batch(rank), "edcba").sum().backward()
        module = px.replicate(Uses(), **SMALL)
        for _ in range(6):
            module.zero_grad()
            module(batch(rank), "edcba").sum().backward()
        assert is_on(module)
        module.zero_grad()
        module(batch(rank), names).sum().backward()
        reference = Uses()
        torch.stack([reference(batch(of), names).sum() for of in range(size)]).mean().backward()
        for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
            what = f"{name} after {names}"
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, what=what: f"{what}: {text}")


@on_both
def test_one_comes_again_in_the_place_of_another(where: str) -> None:
    in_ranks(where, one_comes_again)
