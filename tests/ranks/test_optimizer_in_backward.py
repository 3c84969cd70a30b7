"""Optimizers that step in backward: the same bits as an ordinary step on the averages, whichever way they are given."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches
from tests.ranks.replicas import SMALL, batch, equal_on_all_ranks, flush_engine, mlp
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward, _get_in_backward_optimizers

import phalanx as px
from phalanx.testing import ranks

both_backends = pytest.mark.parametrize("backend", ["gloo", "phalanx"])
KEPT = "torch keeps the parameters given to _apply_optimizer_in_backward in a table for good"
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}
FACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "replicate": lambda module: px.replicate(module, **SMALL),
    "ddp": lambda module: px.DistributedDataParallel(module, bucket_cap_mb=0.0002),
    "ddp, views": lambda module: px.DistributedDataParallel(module, gradient_as_bucket_view=True),
    "ddp, static": lambda module: px.DistributedDataParallel(module, static_graph=True, bucket_cap_mb=0.0002),
}


def train(model: nn.Module, step: Callable[[], None], *, steps: int = 4, keeps: bool = False) -> list[torch.Tensor]:
    for number in range(steps):
        model(batch(dist.get_rank(), number)).square().mean().backward()
        step()
        if keeps:
            model.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def ordinary(wrap: Callable[[nn.Module], nn.Module], which: str) -> list[torch.Tensor]:
    model = wrap(mlp())
    cls, options = OPTIMIZERS[which]
    optimizer = cls(model.parameters(), **options)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return train(model, step)


def assert_same(mine: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    assert all(torch.equal(p, q) for p, q in zip(mine, wanted, strict=True)), what
    assert not any(torch.equal(p, q) for p, q in zip(mine, mlp().parameters(), strict=True)), what  # they did step


@both_backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_ordinary_optimizer(world_size: int, backend: str) -> None:
    @ranks(world_size, backend=backend)
    def body() -> None:
        for face, wrap in FACES.items():
            for which, (cls, options) in OPTIMIZERS.items():
                model = wrap(mlp())
                px.step_in_backward(model, cls(model.parameters(), **options))

                def all_freed(model: nn.Module = model) -> None:
                    assert all(parameter.grad is None for parameter in model.parameters())

                assert_same(train(model, all_freed), ordinary(wrap, which), f"{which} with {face}")

    body()


@both_backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_registered_as_fused(world_size: int, backend: str) -> None:
    @ranks(world_size, backend=backend)
    def body() -> None:
        for face, wrap in FACES.items():
            if face == "replicate":
                continue
            for which, (cls, options) in OPTIMIZERS.items():
                model = wrap(mlp())
                model._register_fused_optim(cls, **options)
                mine = train(model, lambda: None, keeps=True)
                assert_same(mine, ordinary(wrap, which), f"{which} with {face}")

    body()


@pytest.mark.parametrize("world_size", [2, 3])
def test_torchs_own_per_parameter(world_size: int) -> None:
    @ranks(world_size, allow_leaks=KEPT)
    def body() -> None:
        for face, wrap in FACES.items():
            for which, before in (("sgd", True), ("adam", False), ("adamw", True), ("adamw", False)):
                cls, options = OPTIMIZERS[which]
                module = mlp()
                if before:
                    _apply_optimizer_in_backward(cls, module.parameters(), options)
                model = wrap(module)
                if not before:
                    _apply_optimizer_in_backward(cls, module.parameters(), options)
                mine = train(model, lambda: None)
                assert_same(mine, ordinary(wrap, which), f"{which} with {face}, given before: {before}")
                states = [optimizer.state_dict()["state"] for optimizer in _get_in_backward_optimizers(module)]
                assert len(states) == 6 and all(states)

    body()


@both_backends
def test_some_parameters_only(backend: str) -> None:
    """The others have their average left in place, for an optimizer of the user's."""

    @ranks(2, backend=backend)
    def body() -> None:
        for face, wrap in FACES.items():
            wanted = ordinary(wrap, "sgd")
            cls, options = OPTIMIZERS["sgd"]
            for fused in (False, True) if face != "replicate" else (False,):
                module = mlp()
                model = wrap(module)
                if fused:
                    model._register_fused_optim(cls, optim_params=module[0].parameters(), **options)
                else:
                    px.step_in_backward(model, cls(module[0].parameters(), **options), free_gradients=False)
                rest = cls([*module[2].parameters(), *module[4].parameters()], **options)

                def step(model: nn.Module = model, rest: torch.optim.Optimizer = rest) -> None:
                    assert all(parameter.grad is not None for parameter in model.parameters())
                    rest.step()
                    model.zero_grad()

                assert_same(train(model, step), wanted, face)

    body()


@both_backends
def test_accumulation_steps_once(backend: str) -> None:
    @ranks(2, backend=backend)
    def body() -> None:
        rank = dist.get_rank()

        def run(model: nn.Module, step: Callable[[], None]) -> list[torch.Tensor]:
            for number in range(3):
                with px.no_sync(model) if px.is_replicated(model) else model.no_sync():
                    before = [p.detach().clone() for p in model.parameters()]
                    model(batch(rank, 2 * number)).square().mean().backward()
                    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
                model(batch(rank, 2 * number + 1)).square().mean().backward()
                step()
            return [p.detach().clone() for p in model.parameters()]

        for face, wrap in FACES.items():
            if "static" in face:
                continue
            plain, model = wrap(mlp()), wrap(mlp())
            optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)

            def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            stepping = px.step_in_backward(model, torch.optim.Adam(model.parameters(), lr=0.01))
            assert_same(run(model, lambda: None), run(plain, step), face)
            assert stepping.num_steps == 3

    body()


@ranks(2, allow_leaks=KEPT)
def test_what_no_rank_used_is_not_stepped() -> None:
    """Adam would move it by its momentum, given a gradient of zeros."""
    rank = dist.get_rank()

    def wraps() -> list[nn.Module]:
        return [
            px.replicate(Branches()),
            px.DistributedDataParallel(Branches(), find_unused_parameters=True),
            px.DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=True),
        ]

    by_hand, in_backward, fused, per_parameter = wraps(), wraps(), wraps()[1:], wraps()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in by_hand]
    for model in in_backward:
        px.step_in_backward(model, torch.optim.Adam(model.parameters(), lr=0.05))
    for model in fused:
        model._register_fused_optim(torch.optim.Adam, lr=0.05)
    for model in per_parameter:
        _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.05})
    for step in range(4):
        use = (0, 1) if step < 2 else (0,)  # used at first, so that there is momentum
        for model in (*by_hand, *in_backward, *fused, *per_parameter):
            model(batch(rank, step), use=use).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model in fused:
            model.zero_grad()
    for model in (*by_hand[1:], *in_backward, *fused, *per_parameter):
        for mine, wanted in zip(model.parameters(), by_hand[0].parameters(), strict=True):
            assert torch.equal(mine, wanted)


@ranks(2, allow_leaks=KEPT)
def test_ignored_parameters_step_on_local_gradients() -> None:
    def ignoring() -> nn.Sequential:
        module = mlp()
        px.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        return module

    modules = [mlp(), ignoring(), ignoring()]
    replicated = px.replicate(modules[0], ignore=["0.weight"])
    px.step_in_backward(replicated, torch.optim.SGD(replicated.parameters(), lr=0.1))
    wrapped = [px.DistributedDataParallel(module) for module in modules[1:]]
    px.step_in_backward(wrapped[0], torch.optim.SGD(wrapped[0].parameters(), lr=0.1))
    _apply_optimizer_in_backward(torch.optim.SGD, modules[2].parameters(), {"lr": 0.1})
    for model, module in zip((replicated, *wrapped), modules, strict=True):
        model(batch(dist.get_rank())).square().mean().backward()
        assert not equal_on_all_ranks(module[0].weight) and equal_on_all_ranks(module[0].bias)
        assert module[0].weight.grad is None and module[0].bias.grad is None
        alone = mlp()
        alone(batch(dist.get_rank())).square().mean().backward()
        torch.testing.assert_close(module[0].weight, alone[0].weight - 0.1 * alone[0].weight.grad)


@both_backends
def test_clipping_schedules_and_checkpoints(backend: str) -> None:
    """What needs all gradients at once, or the optimizer itself, works as ever."""

    @ranks(2, backend=backend)
    def body() -> None:
        def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
            model = px.replicate(mlp(), **SMALL)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        plain, optimizer, schedule = make()

        def step() -> None:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        wanted = train(plain, step, steps=8)
        model, first, schedule = make()
        px.step_in_backward(model, first, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        train(model, schedule.step, steps=4)
        saved = pickle.loads(pickle.dumps((model.state_dict(), first.state_dict(), schedule.state_dict())))
        model, second, schedule = make()
        for part, state in zip((model, second, schedule), saved, strict=True):
            part.load_state_dict(state)
        px.step_in_backward(model, second, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        for number in range(4, 8):
            model(batch(dist.get_rank(), number)).square().mean().backward()
            schedule.step()
        assert_same(list(model.parameters()), wanted, "resumed")
        assert str(second.state_dict()["param_groups"]) == str(optimizer.state_dict()["param_groups"])

    body()


@both_backends
def test_a_failed_backward_steps_nobody_and_a_rank_may_skip(backend: str) -> None:
    @ranks(2, backend=backend)
    def body() -> None:
        rank = dist.get_rank()
        model = px.replicate(mlp())
        stepping = px.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model(batch(rank)).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(batch(rank, 1)).square().mean()
        if rank == 1:
            handle = model[0].weight.register_hook(lambda _: (_ for _ in ()).throw(ValueError("mine")))
        with pytest.raises(ValueError if rank else px.errors.PeerFailedError):
            loss.backward()
        if rank == 1:
            handle.remove()
        flush_engine()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        if rank == 1:
            model(batch(rank, 2)).square().mean().backward()
        else:
            px.synchronize(model)
        assert stepping.num_steps == 2
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert all(equal_on_all_ranks(p) for p in model.parameters())

    body()


@ranks(2)
def test_it_ends_and_copies_step_nothing() -> None:
    rank = dist.get_rank()
    model = px.replicate(mlp())
    stepping = px.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(batch(rank)).square().mean().backward()
        assert twin[0].weight.grad is not None and torch.equal(twin[0].weight, model[0].weight)
    stepping.remove()
    model(batch(rank)).square().mean().backward()
    assert model[0].weight.grad is not None and stepping.num_steps == 0
    px.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))  # again, by another
    model(batch(rank)).square().mean().backward()
    assert model[0].weight.grad is None


@ranks(2)
def test_the_module_keeps_the_optimizer_and_nothing_keeps_the_module() -> None:
    model = px.replicate(mlp())
    clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
    px.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1), before_step=clip)
    del clip
    gc.collect()
    before = model[0].weight.detach().clone()
    model(batch(dist.get_rank())).square().mean().backward()
    assert not torch.equal(model[0].weight, before)
    gone = weakref.ref(model), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@both_backends
def test_bad_input(backend: str) -> None:
    @ranks(2, backend=backend)
    def body() -> None:
        rank = dist.get_rank()
        model, other = px.replicate(mlp()), px.replicate(mlp())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="is not replicated"):
            px.step_in_backward(mlp(), sgd)
        with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, made; got"):
            px.step_in_backward(model, torch.optim.SGD)
        with pytest.raises(ValueError, match="LBFGS runs backward passes itself"):
            px.step_in_backward(model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(
            ValueError, match=r"parameter 0 of group 0 \(shape \[8, 6\]\) is not one of this Sequential"
        ):
            px.step_in_backward(other, sgd)
        with pytest.raises(TypeError, match="free_gradients must be True or False"):
            px.step_in_backward(model, sgd, free_gradients=1)
        with pytest.raises(TypeError, match="before_step must be a function"):
            px.step_in_backward(model, sgd, before_step=3)
        mine = torch.optim.Adam(model.parameters()) if rank else sgd
        with pytest.raises(px.errors.MismatchError, match="step differently in backward: the optimizer: here"):
            px.step_in_backward(model, mine)
        with pytest.raises(TypeError if rank else px.errors.MismatchError, match="before_step must be a function"):
            px.step_in_backward(model, sgd, before_step=3 if rank else None)
        px.step_in_backward(model, sgd)
        with pytest.raises(ValueError, match="is already stepped in backward by another optimizer: remove that first"):
            px.step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ddp = px.DistributedDataParallel(mlp())
        ddp._register_fused_optim(torch.optim.SGD, 0.1)
        with pytest.raises(ValueError, match="is already stepped in backward"):
            ddp._register_fused_optim(torch.optim.SGD, 0.1)

    body()
