"""Model averagers and post-local SGD: bit for bit what torch's classes give, and what the ranks must agree on."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim  # here: inside a group its import keeps that alive
from tests.ranks.replicas import equal_on_all_ranks, mlp, plain_loss
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchPeriodic
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager as TorchHierarchical,
)
from torch.distributed.optim import PostLocalSGDOptimizer as TorchPostLocalSGD
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.comm.c10d import C10dGroup
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.testing import ranks, run_ranks

both_backends = pytest.mark.parametrize("backend", ["gloo", "phalanx"])
two_and_three = pytest.mark.parametrize("world", [2, 3])


def local_step(model: nn.Module, step: int) -> None:
    """SGD on this rank's data alone: the ranks' models drift apart."""
    model.zero_grad()
    plain_loss(model, dist.get_rank(), step).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad


def compare(mine: nn.Module, other: nn.Module, when: str) -> None:
    for (name, a), b in zip(mine.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} {when}"


def alike_on_all_ranks(model: nn.Module) -> bool:
    return all(equal_on_all_ranks(parameter) for parameter in model.parameters())


# -- parity -----------------------------------------------------------------------------------------------------------


def train_with_both(make: Callable[[bool], Any], steps: int, *, groups: bool = False) -> list[bool]:
    """Local steps on two copies, one averaged by torch's class; returns in which steps all ranks ended up alike."""
    models, averagers = (mlp(), mlp()), (make(True), make(False))
    given = [torch.optim.SGD(m.parameters(), lr=0.1).param_groups if groups else m for m in models]
    alike = []
    for step in range(steps):
        for model, averager, what in zip(models, averagers, given, strict=True):
            local_step(model, step)
            averager.average_parameters(what if groups else what.parameters())
        compare(*models, f"after step {step}")
        assert averagers[0].step == averagers[1].step == step + 1
        alike.append(alike_on_all_ranks(models[0]))
    return alike


def periodic_as_torch(warmup: int, groups: bool) -> None:
    def make(ours: bool) -> Any:
        return (px.PeriodicModelAverager if ours else TorchPeriodic)(3, warmup_steps=warmup)

    assert isinstance(make(True), TorchPeriodic | ModelAverager)
    alike = train_with_both(make, 9, groups=groups)
    assert alike == [step >= warmup and (step - warmup) % 3 == 0 for step in range(9)]


@both_backends
@two_and_three
@pytest.mark.parametrize("groups", [False, True], ids=["parameters", "groups"])
def test_periodic_averager_gives_what_torchs_gives(world: int, backend: str, groups: bool) -> None:
    run_ranks(periodic_as_torch, world, 2, groups, backend=backend)


def hierarchical_as_torch(levels: dict[int, int], warmup: int) -> None:
    made: list[Any] = []

    def make(ours: bool) -> Any:
        made.append((px.HierarchicalModelAverager if ours else TorchHierarchical)(OrderedDict(levels), warmup))
        return made[-1]

    train_with_both(make, 13)
    mine, other = (averager.period_process_group_dict for averager in made)
    for period, group in other.items():
        assert dist.get_process_group_ranks(mine[period]) == dist.get_process_group_ranks(group)
        assert dist.get_backend(mine[period]) == dist.get_backend(group)
    assert isinstance(made[0], TorchHierarchical)


@both_backends
@pytest.mark.parametrize(
    "world, levels",
    [(2, {3: 2}), (2, {2: 1, 4: 2}), (3, {2: 1, 3: 3}), (4, {2: 2, 4: 4}), (4, {2: 2, 3: 4, 5: 4})],
    ids=str,
)
def test_hierarchical_averager_gives_what_torchs_gives(world: int, levels: dict[int, int], backend: str) -> None:
    run_ranks(hierarchical_as_torch, world, levels, 2, backend=backend)


def uneven_groups() -> None:
    """Torch refuses sizes that do not divide the number of ranks; here the last group is smaller."""
    rank, world = dist.get_rank(), dist.get_world_size()
    averager = px.HierarchicalModelAverager({2: 2, 5: world})
    weight = nn.Parameter(torch.empty(3))
    for step in range(11):
        weight.data.fill_(rank)
        weight.grad = torch.ones(3)
        averager.average_parameters([weight])
        if step % 5 == 0:
            expected = sum(range(world)) / world
        elif step % 2 == 0:
            expected = 0.5 if rank < 2 else 2.0
        else:
            expected = float(rank)
        torch.testing.assert_close(weight.detach(), torch.full((3,), expected), rtol=1e-6, atol=0)


@both_backends
def test_a_hierarchy_of_groups_that_are_not_of_one_size(backend: str) -> None:
    run_ranks(uneven_groups, 3, backend=backend)


def within_a_group() -> None:
    """Ranks outside of the group keep their parameters and count their steps."""
    rank = dist.get_rank()
    group = dist.new_group([0, 2])
    averager = px.PeriodicModelAverager(2, process_group=group)
    weight = nn.Parameter(torch.full((2,), float(5 if rank == 1 else rank)))
    weight.grad = torch.ones(2)
    averager.average_parameters([weight])
    assert weight.tolist() == ([5.0, 5.0] if rank == 1 else [1.0, 1.0]) and averager.step == 1
    weight.data.fill_(rank)
    if rank != 1:
        px.HierarchicalModelAverager({2: 1, 4: 2}, process_group=group).average_parameters([weight])
        assert weight.tolist() == [1.0, 1.0]


@both_backends
def test_averaging_within_a_group(backend: str) -> None:
    run_ranks(within_a_group, 3, backend=backend)


def post_local_sgd_as_torch(levels: dict[int, int] | None) -> None:
    """The whole recipe: DDP with the post-local SGD hook, a wrapped optimizer, a checkpoint in the middle."""
    rank, start = dist.get_rank(), 2
    models: list[nn.Module] = []
    optimizers: list[Any] = []
    for ours in (True, False):
        group = dist.new_group()
        model = (px.DistributedDataParallel if ours else TorchDDP)(mlp(), process_group=group)
        state = PostLocalSGDState(group, group, start, post_local_gradient_allreduce=False)
        model.register_comm_hook(state, post_localSGD_hook)
        models.append(model)
        optimizers.append(post_local(model, ours, levels, start))
    for step in range(8):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            plain_loss(model, rank, step).backward()
            optimizer.step()
            if step == 4:  # in the middle of a period
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                file.seek(0)
                optimizers[number] = post_local(model, number == 0, levels, start)
                optimizers[number].load_state_dict(torch.load(file))
                assert optimizers[number].averager.step == 5
        compare(*models, f"after step {step}")
    assert isinstance(optimizers[0], TorchPostLocalSGD)


def post_local(model: nn.Module, ours: bool, levels: dict[int, int] | None, start: int) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if levels is None:
        averager: Any = (px.PeriodicModelAverager if ours else TorchPeriodic)(2, warmup_steps=start)
    else:
        averager = (px.HierarchicalModelAverager if ours else TorchHierarchical)(OrderedDict(levels), start)
    return (px.PostLocalSGDOptimizer if ours else TorchPostLocalSGD)(sgd, averager)


@both_backends
@pytest.mark.parametrize("world, levels", [(2, None), (3, None), (4, {2: 2, 4: 4})], ids=str)
def test_post_local_sgd_trains_as_torchs_and_through_a_reload(
    world: int, levels: dict[int, int] | None, backend: str
) -> None:
    run_ranks(post_local_sgd_as_torch, world, levels, backend=backend)


# -- how it is done -----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Several dtypes, a layout that is not contiguous, a tied weight, a frozen one and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.double = nn.Linear(3, 3).double()
        self.half = nn.Linear(3, 3).bfloat16()
        self.tied = self.double
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.complex = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def mixed_model() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, start = Mixed(), Mixed()
    used = {n: p for n, p in model.named_parameters() if n not in ("frozen", "unused")}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    for parameter in used.values():
        parameter.grad = torch.zeros_like(parameter)
    memory = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
    sums: list[tuple[torch.dtype, str]] = []
    real = C10dGroup.all_reduce

    def noted(self: C10dGroup, tensor: torch.Tensor, kind: Any = "sum") -> Any:
        sums.append((tensor.dtype, kind))
        return real(self, tensor, kind)

    C10dGroup.all_reduce = noted  # type: ignore[method-assign]
    px.PeriodicModelAverager(2).average_parameters(model.parameters())
    C10dGroup.all_reduce = real  # type: ignore[method-assign]
    plain = [dtype for dtype, kind in sums if kind == "sum"]
    assert sorted(map(str, plain)) == sorted(str(p) for p in {p.dtype for p in used.values()})  # one for each dtype
    assert len(sums) == len(plain) + 1  # and one by which the ranks agree
    mean = (world - 1) / 2
    for name, before in start.named_parameters():
        after = dict(model.named_parameters())[name]
        expected = before + (mean if name in used else rank)
        torch.testing.assert_close(after, expected, msg=name)
        assert (after.data_ptr(), after.stride()) == memory[name], name
        if name in used:
            assert equal_on_all_ranks(after)


@both_backends
@two_and_three
def test_one_collective_for_each_dtype_into_the_parameters_own_memory(world: int, backend: str) -> None:
    run_ranks(mixed_model, world, backend=backend)


def large_model() -> None:
    """More than one piece: what was packed while another was on its way comes back to its own place."""
    from phalanx.comm.c10d import group_of
    from phalanx.optim.averaging import average_parameters

    rank, world = dist.get_rank(), dist.get_world_size()
    parameters = [nn.Parameter(torch.full((n,), float(n + rank))) for n in (5, 1, 9, 30, 2, 2, 40)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    average_parameters(parameters, group_of(dist.group.WORLD), setting="", piece_bytes=40)
    for parameter in parameters:
        expected = torch.full_like(parameter, len(parameter) + (world - 1) / 2)
        torch.testing.assert_close(parameter.detach(), expected)


@both_backends
def test_a_model_larger_than_a_piece(backend: str) -> None:
    run_ranks(large_model, 3, backend=backend)


@both_backends
@two_and_three
def test_ranks_need_not_have_used_the_same_parameters(world: int, backend: str) -> None:
    run_ranks(different_gradients, world, backend=backend)


def different_gradients() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    weights = [nn.Parameter(torch.full((2,), float(rank))) for _ in range(world + 1)]
    weights[rank].grad = torch.ones(2)  # each rank used another one, and none the last
    px.PeriodicModelAverager(2).average_parameters(weights)
    mean = sum(range(world)) / world
    for weight in weights[:-1]:
        torch.testing.assert_close(weight.detach(), torch.full((2,), mean))
    assert weights[-1].tolist() == [rank, rank]


def replicated_local_sgd() -> None:
    """Local SGD on a replicated model: in no_sync backward and step stay on the rank, the averager brings it together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = px.replicate(mlp())
    copies = [mlp() for _ in range(world)]  # every rank's model, in one process
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    averager = px.PeriodicModelAverager(2)
    for step in range(5):
        with px.no_sync(model):
            optimizer.zero_grad()
            plain_loss(model, rank, step).backward()
            optimizer.step()
        averager.average_parameters(model.parameters())
        for number, copy in enumerate(copies):
            copy.zero_grad()
            plain_loss(copy, number, step).backward()
            with torch.no_grad():
                for parameter in copy.parameters():
                    parameter -= 0.01 * parameter.grad
        if step % 2 == 0:
            with torch.no_grad():
                for across in zip(*(copy.parameters() for copy in copies), strict=True):
                    mean = sum(across) / world
                    for parameter in across:
                        parameter.copy_(mean)
            assert alike_on_all_ranks(model)
        for mine, other in zip(model.parameters(), copies[rank].parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    plain_loss(model, rank, 9).backward()  # and the replica still synchronises
    assert all(equal_on_all_ranks(parameter.grad) for parameter in model.parameters())


@both_backends
@two_and_three
def test_local_sgd_on_a_replicated_model(world: int, backend: str) -> None:
    run_ranks(replicated_local_sgd, world, backend=backend)


# -- checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
@ranks(2)
def test_an_averager_goes_on_from_its_checkpoint(kind: str) -> None:
    def make() -> Any:
        return px.PeriodicModelAverager(3, 1) if kind == "periodic" else px.HierarchicalModelAverager({2: 1, 3: 2}, 1)

    whole, resumed = mlp(), mlp()
    through, before = make(), make()
    for step in range(3):
        for model, averager in ((whole, through), (resumed, before)):
            local_step(model, step)
            averager.average_parameters(model.parameters())
    file = io.BytesIO()
    torch.save({"model": resumed.state_dict(), "averager": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    resumed, after = mlp(seed=5), make()
    resumed.load_state_dict(saved["model"])
    after.load_state_dict(saved["averager"])
    assert after.step == 3
    for step in range(3, 9):
        for model, averager in ((whole, through), (resumed, after)):
            local_step(model, step)
            averager.average_parameters(model.parameters())
        compare(resumed, whole, f"after step {step}")
    for wrong in ({}, {"step": -1}, {"step": "3"}, {"steps": 3}, 3):
        with pytest.raises(ValueError, match="an averager's state is"):
            after.load_state_dict(wrong)
    assert after.step == 9


@ranks(1)
def test_an_optimizers_checkpoint_is_torchs() -> None:
    model = mlp()
    mine, other = (post_local(model, ours, None, 0) for ours in (True, False))
    for optimizer in (mine, other):
        plain_loss(model, 0, 0).backward()
        optimizer.step()
    assert mine.state_dict().keys() == other.state_dict().keys()
    other.load_state_dict(mine.state_dict())
    mine.load_state_dict(other.state_dict())
    state = mine.state_dict()
    assert state.pop("step") == 1
    for optimizer in (mine, other):
        with pytest.warns(
            UserWarning, match="does not contain a step counter for an averager. Setting step counter to 0"
        ):
            optimizer.load_state_dict(state)
        assert optimizer.averager.step == 0
    assert repr(mine) == repr(mine.optim)


@ranks(1)
def test_a_wrapped_optimizer_stays_one_with_its_wrapper() -> None:
    """With torch's, a scheduler has no effect after a reload: the wrapper holds the list that the reload replaced."""
    model = mlp()
    optimizer = post_local(model, True, None, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is optimizer.optim.param_groups and optimizer.defaults is optimizer.optim.defaults
    assert optimizer.state is optimizer.optim.state
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = plain_loss(model, 0, 0)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(optimizer.step(closure), torch.Tensor)
        scheduler.step()
    assert optimizer.optim.param_groups[0]["lr"] == 0.005
    assert called == ["before", "after"]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2
    optimizer.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.optim.param_groups) == 1


# -- mistakes -----------------------------------------------------------------------------------------------------------


BAD_LEVELS = {
    "must not be empty": {},
    "must be a positive value": {0: 2},
    "must be equal to the size": {2: 1},
    "must grow": {4: 1, 2: 2},
    "positive and must not shrink": {2: 0, 4: 2},
    "whole numbers": {2: 1.5, 4: 2},
}


@pytest.mark.parametrize("text", BAD_LEVELS)
@ranks(2, timeout_s=20)
def test_a_hierarchy_that_makes_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        px.HierarchicalModelAverager(BAD_LEVELS[text])
    if dist.get_rank() == 1:  # on one rank alone: the others would make groups, and wait for it
        with pytest.raises(ValueError, match=text):
            px.HierarchicalModelAverager(BAD_LEVELS[text])
    else:
        with pytest.raises(PeerFailedError, match=f"rank 1 could not make its averager: .*{text}") as caught:
            px.HierarchicalModelAverager({2: 1, 4: 2})
        assert caught.value.failed_ranks == (1,)
    with pytest.raises(MismatchError, match="different averagers"):
        px.HierarchicalModelAverager({2: 1, 4 + dist.get_rank(): 2})
    px.HierarchicalModelAverager({2: 1, 4: 2})  # and the ranks are still in step


@ranks(2)
def test_wrong_arguments() -> None:
    for periodic in (px.PeriodicModelAverager, TorchPeriodic):
        with pytest.raises(ValueError, match="Arg ``warmup_steps`` must be a non-negative number"):
            periodic(2, -1)
        with pytest.raises(ValueError, match="Arg ``period`` must be a positive value"):
            periodic(0)
        with pytest.warns(UserWarning, match="When period is 1, no need to use model averaging"):
            periodic(1)
    for make in (px.HierarchicalModelAverager, TorchHierarchical):
        with pytest.warns(UserWarning, match="When the maximum period in arg ``period_group_size_dict`` is 1"):
            make({1: 2})
        with pytest.raises(ValueError, match="Arg ``warmup_steps`` must be a non-negative number"):
            make({2: 2}, -1)
    sgd = torch.optim.SGD(mlp().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got Sequential"):
        px.PostLocalSGDOptimizer(mlp(), px.PeriodicModelAverager(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a model averager.*got int"):
        px.PostLocalSGDOptimizer(sgd, 4)  # type: ignore[arg-type]


@ranks(4)
def test_groups_that_do_not_nest_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="groups of 2 ranks do not fit into groups of 3"):
        px.HierarchicalModelAverager({2: 2, 3: 3, 6: 4})


@ranks(1, backend=None)
def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"call phalanx.init\(\)"):
        px.PeriodicModelAverager(2)


def linears(*widths: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(width)) for width in widths]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


@both_backends
def test_what_cannot_be_averaged_is_told_on_every_rank(backend: str) -> None:
    run_ranks(cannot_average, 2, backend=backend, timeout_s=20)


def cannot_average() -> None:
    odd = dist.get_rank() == 1

    def refused(kind: Any, text: str, params: Any, averager: Any = None) -> None:
        with pytest.raises(kind, match=text):
            (averager or px.PeriodicModelAverager(2)).average_parameters(params)

    refused(MismatchError, r"parameter number 1 is shape \[[34]\] of torch.float32", linears(2, 4 if odd else 3))
    refused(
        MismatchError, r"2 parameters here, 3 on rank 1|3 parameters here, 2 on rank 0", linears(*[2, 2, 2][odd ^ 1 :])
    )
    refused(MismatchError, r"period=[23]", linears(2), px.PeriodicModelAverager(2 + odd))
    late = px.PeriodicModelAverager(2)
    late.load_state_dict({"step": 4 * odd})
    refused(MismatchError, "at step 4", linears(2), late)
    assert late.step == 4 * odd
    used_up = iter(linears(2))
    next(used_up)
    refused(ValueError, "used up by one loop", used_up)
    refused(ValueError if odd else PeerFailedError, "used up by one loop", [] if odd else linears(2))
    kind = NotImplementedError if odd else PeerFailedError
    refused(kind, "Parameter input of type .*Tensor", [torch.ones(2)] if odd else linears(2))
    lazy = nn.LazyLinear(2).parameters() if odd else nn.Linear(2, 2).parameters()
    refused(ValueError if odd else PeerFailedError, "holds no values yet", lazy)
    refused(ValueError, "no parameter has a gradient on any rank", nn.Linear(2, 2).parameters())
    px.PeriodicModelAverager(2).average_parameters(linears(2))  # and the ranks are still in step
