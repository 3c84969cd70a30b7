"""Communication hooks: torch's own ones unchanged, what a hook is handed, and hooks that do wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import Branches, Pair, square_loss
from tests.ranks.replicas import (
    assert_gradients,
    average_gradients,
    batch,
    equal_on_all_ranks,
    flush_engine,
    mlp,
    plain_loss,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.optim import _apply_optimizer_in_backward  # here: inside a group its import keeps that alive
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx.errors import PeerFailedError
from phalanx.testing import ranks

TWO_BUCKETS = {"bucket_cap_mb": 0.0002}
AnyDDP = TorchDDP | px.DistributedDataParallel


def power_sgd(model: AnyDDP, **options: Any) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(model.process_group, start_powerSGD_iter=2, min_compression_rate=0.5, **options)


# Left out, since torch's own class cannot run them here either: quantization (indexes what Gloo's all_gather does not
# return), batched PowerSGD (an assertion of its own fails), bfloat16 and ZeRO (ask for NCCL), mixed precision and
# optimizers in backward (ask for streams).
HOOKS: dict[str, Callable[[AnyDDP], tuple[Any, Any]]] = {
    "allreduce": lambda m: (m.process_group, default_hooks.allreduce_hook),
    "fp16": lambda m: (m.process_group, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda m: (m.process_group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "noop": lambda m: (None, debugging_hooks.noop_hook),
    "power": lambda m: (power_sgd(m), powerSGD_hook.powerSGD_hook),
    "power rank 2": lambda m: (power_sgd(m, matrix_approximation_rank=2), powerSGD_hook.powerSGD_hook),
    "power in fp16": lambda m: (power_sgd(m), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
    "local": lambda m: (
        post_localSGD_hook.PostLocalSGDState(m.process_group, m.process_group, start_localSGD_iter=2),
        post_localSGD_hook.post_localSGD_hook,
    ),
    "local without": lambda m: (
        post_localSGD_hook.PostLocalSGDState(
            m.process_group, None, start_localSGD_iter=2, post_local_gradient_allreduce=False
        ),
        post_localSGD_hook.post_localSGD_hook,
    ),
}


@pytest.mark.parametrize("which", HOOKS)
@ranks(2)
def test_torchs_hooks_give_what_they_give_with_torch(which: str) -> None:
    pair = Pair.of(mlp, **({} if "power" in which else TWO_BUCKETS))  # with several torch's own hangs on Gloo
    for model in pair.both():
        np.random.seed(0)
        model.register_comm_hook(*HOOKS[which](model))
    pair.train(square_loss, steps=6)


@pytest.mark.parametrize("which", ["allreduce", "fp16", "fp16 wrapper", "power"])
@ranks(2)
def test_torchs_hooks_on_bucket_views(which: str) -> None:
    pair = Pair.of(mlp, gradient_as_bucket_view=True, **({} if "power" in which else TWO_BUCKETS))
    for model in pair.both():
        model.register_comm_hook(*HOOKS[which](model))
    pair.train(square_loss, steps=6)


@pytest.mark.parametrize("which", [name for name in HOOKS if "power" in name])
@ranks(2)
def test_hooks_that_start_further_collectives_take_turns(which: str) -> None:
    """With several buckets, torch's own class starts these from Gloo's threads in any order, and hangs."""
    model = px.DistributedDataParallel(mlp(), **TWO_BUCKETS)
    model.register_comm_hook(*HOOKS[which](model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        optimizer.zero_grad()
        square_loss(model, dist.get_rank(), step).backward()
        assert all(equal_on_all_ranks(parameter.grad) for parameter in model.parameters())
        optimizer.step()
    assert len(model._engine.buckets) > 1


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=["unused", "static"]
)
@ranks(2)
def test_hooks_with_unused_parameters(options: dict) -> None:
    pair = Pair.of(Branches, **options)
    for model in pair.both():
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
    pair.train(lambda model, rank, step: model(batch(rank, step), (0,)).square().mean(), steps=5)


@ranks(2)
def test_hooks_under_no_sync_and_join() -> None:
    rank = dist.get_rank()
    pair = Pair.of(mlp, **TWO_BUCKETS)
    for model in pair.both():
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.join():
            for step in range(2 + rank):
                with model.no_sync():
                    square_loss(model, rank, 20 + step).backward()
                square_loss(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    pair.compare_state()


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
@ranks(2)
def test_built_in_hooks(kind: str) -> None:
    pair = Pair.of(mlp, **TWO_BUCKETS)
    for model in pair.both():
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
    pair.train(square_loss, steps=4)
    assert pair.ours._get_ddp_logging_data()["comm_hook"] == pair.theirs._get_ddp_logging_data()["comm_hook"]


@ranks(2)
def test_registration_by_type() -> None:
    pair = Pair.of(mlp)
    for model in pair.both():
        register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model, model.process_group)
    pair.train(square_loss, steps=3)


@ranks(2)
def test_the_reducers_own_all_reduce_as_a_hook() -> None:
    """torch's mixed precision and its optimizers in backward call it, and divide afterwards."""
    pair = Pair.of(mlp, **TWO_BUCKETS)
    for model in pair.both():

        def summed(state, bucket):  # without annotations: torch takes them as text here, and refuses them
            future = state().reducer._run_allreduce_hook(bucket)
            return future.then(lambda done: bucket.buffer().div_(4))

        model.register_comm_hook(weakref.ref(model), summed)
    pair.train(square_loss, steps=3)


@ranks(2)
def test_an_optimizer_fused_into_the_hook() -> None:
    model, reference = px.DistributedDataParallel(mlp(), **TWO_BUCKETS), mlp()
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
        average_gradients(reference, plain_loss, step)
        optimizer.step()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
@ranks(2, allow_leaks="torch keeps the parameters given to _apply_optimizer_in_backward in a table for good")
def test_optimizers_in_backward_step_on_the_averages(options: dict) -> None:
    """torch's class cannot do this on the CPU; ours steps at the end of backward, on all ranks alike."""
    rank = dist.get_rank()
    module, reference = mlp(), mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = px.DistributedDataParallel(module, **options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        with model.no_sync():
            plain_loss(model, rank, 50 + step).backward()
        plain_loss(model, rank, step).backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        average_gradients(reference, lambda m, r, s: plain_loss(m, r, s) + plain_loss(m, r, 50 + s), step)
        optimizer.step()
        for mine, other in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


# -- what a hook is handed --------------------------------------------------------------------------------------------


class Recorder:
    """A hook that notes what it sees, and averages."""

    def __init__(self, model: AnyDDP) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.calls: list[tuple[Any, ...]] = []
        self.group = model.process_group

    def note(self, bucket: Any) -> None:
        shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
        names = [self.names[id(parameter)] for parameter in bucket.parameters()]
        self.calls.append((bucket.index(), bucket.is_last(), tuple(bucket.buffer().shape), names, shapes))


def recording(state, bucket):
    state.note(bucket)
    return default_hooks.allreduce_hook(state.group, bucket)


@ranks(2)
def test_buckets_are_numbered_and_filled_as_torchs() -> None:
    pair = Pair.of(mlp, **TWO_BUCKETS)
    recorders = []
    for model in pair.both():
        recorders.append(Recorder(model))
        model.register_comm_hook(recorders[-1], recording)
    pair.train(square_loss, steps=3)
    mine, other = (recorder.calls for recorder in recorders)
    assert mine == other
    assert [call[:2] for call in mine] == [(0, True), (0, False), (1, True), (0, False), (1, True)]


def tripled(state: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    for gradient in bucket.gradients():
        gradient.mul_(3)  # views of the buffer
    assert torch.equal(torch.cat([g.flatten() for g in bucket.gradients()]), bucket.buffer())
    bucket.set_buffer(bucket.buffer() / 3)  # from now on that one counts
    return default_hooks.allreduce_hook(state, bucket)


@ranks(2)
def test_gradients_are_views_of_the_buffer_and_the_buffer_can_be_replaced() -> None:
    model = px.DistributedDataParallel(mlp())
    model.register_comm_hook(model.process_group, tripled)
    reference = mlp()
    for step in range(3):
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
        assert_gradients(model.module, average_gradients(reference, plain_loss, step))


@ranks(2)
def test_a_hook_that_is_an_object_or_a_bound_method() -> None:
    class Averager:
        def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

        def run(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            return self(state, bucket)

    model = px.DistributedDataParallel(mlp())
    model.register_comm_hook(None, Averager().run)
    plain_loss(model, dist.get_rank(), 0).backward()
    assert_gradients(model.module, average_gradients(mlp(), plain_loss, 0))


@ranks(2)
def test_sparse_gradients_pass_through_a_hook() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))

    pair = Pair.of(make)
    for model in pair.both():
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)
        model(torch.tensor([dist.get_rank(), 5])).square().sum().backward()
    mine, other = (model.module[0].weight.grad.to_dense() for model in pair.both())
    assert torch.equal(mine, other)


# -- hooks that do wrong ----------------------------------------------------------------------------------------------


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def no_future(state: Any, bucket: Any) -> Any:
    return bucket.buffer()


def no_tensor(state: Any, bucket: Any) -> Any:
    return done("not a tensor")


def too_short(state: Any, bucket: Any) -> Any:
    return done(bucket.buffer()[:-1])


def raises(state: Any, bucket: Any) -> Any:
    raise KeyError("a hook's own error")


def fails_later(state: Any, bucket: Any) -> Any:
    def fail(_: Any) -> None:
        raise KeyError("a hook's own error")

    return done(bucket.buffer()).then(fail)


WRONG = {
    no_future: (TypeError, "must return a torch.futures.Future"),
    no_tensor: (TypeError, "must give a tensor like"),
    too_short: (ValueError, "must give a tensor of"),
    raises: (KeyError, "a hook's own error"),
    fails_later: (RuntimeError, "a hook's own error"),
}


@pytest.mark.parametrize("hook", WRONG)
@ranks(2)
def test_a_hook_that_does_wrong_everywhere_is_told_everywhere(hook: Any) -> None:
    model = px.DistributedDataParallel(mlp())
    model.register_comm_hook(None, hook)
    kind, text = WRONG[hook]
    with pytest.raises(kind, match=text):
        plain_loss(model, dist.get_rank(), 0).backward()
    flush_engine()


@pytest.mark.parametrize("hook", WRONG)
@ranks(3, timeout_s=20)
def test_a_hook_that_does_wrong_on_one_rank_is_told_on_all(hook: Any) -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp())

    def mixed(state: Any, bucket: Any) -> Any:
        return hook(None, bucket) if rank == 1 else default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, mixed)
    kind, text = WRONG[hook] if rank == 1 else (PeerFailedError, "rank 1")
    with pytest.raises(kind, match=text) as caught:
        plain_loss(model, rank, 0).backward()
    if rank != 1:
        assert caught.value.failed_ranks == (1,)
    del caught
    flush_engine()


@ranks(2)
def test_only_one_hook() -> None:
    model = px.DistributedDataParallel(mlp())
    model.register_comm_hook(None, debugging_hooks.noop_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, debugging_hooks.noop_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


@ranks(2)
def test_hooks_that_cannot_be_registered() -> None:
    model = px.DistributedDataParallel(mlp())
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook(None, 1)

    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise NotImplementedError

    def wrong_return(state: object, bucket: dist.GradBucket) -> int:
        raise NotImplementedError

    wrong_bucket.__annotations__["bucket"] = int  # not as text
    wrong_return.__annotations__["return"] = int
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        model.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match="return annotation should be"):
        model.register_comm_hook(None, wrong_return)
    if not torch.cuda.is_available():
        with pytest.raises(TypeError, match="BF16 all reduce communication hook required"):
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    model.register_comm_hook(None, debugging_hooks.noop_hook)  # none of those was kept


@ranks(2)
def test_after_a_failure_on_all_ranks_the_same_instance_trains_on() -> None:
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp(), **TWO_BUCKETS)
    calls = []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(bucket.index())
        if len(calls) == 2:
            raise KeyError("once")
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, hook)
    plain_loss(model, rank, 0).backward()
    with pytest.raises(KeyError):
        plain_loss(model, rank, 1).backward()
    flush_engine()
    reference = mlp()
    for step in range(2, 5):
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model.module, average_gradients(reference, plain_loss, step))


@pytest.mark.parametrize("where", ["hook", "backward"])
@ranks(3, timeout_s=20)
def test_after_a_failure_on_one_rank_every_rank_is_told_again(where: str) -> None:
    """What collectives a hook has left undone nobody knows: the old group is of no use any more, a new one is."""
    rank = dist.get_rank()
    model = px.DistributedDataParallel(mlp(), **TWO_BUCKETS)
    state = {"group": dist.group.WORLD, "fails": False}

    def hook(state: Any, bucket: Any) -> Any:
        if state["fails"]:
            raise KeyError("once")
        return default_hooks.allreduce_hook(state["group"], bucket)

    model.register_comm_hook(state, hook)
    for step in range(2):
        plain_loss(model, rank, step).backward()
    hidden: list[torch.Tensor] = []
    handle = model.module[0].register_forward_hook(lambda module, inputs, output: hidden.append(output))
    loss = plain_loss(model, rank, 2)
    handle.remove()
    if rank == 1:
        state["fails"] = where == "hook"
        if where == "backward":
            hidden[0].register_hook(_raise)
    with pytest.raises(KeyError if rank == 1 else PeerFailedError):
        loss.backward()
    state["fails"] = False
    flush_engine()
    del loss, hidden[:]
    with pytest.raises(PeerFailedError, match="another process group") as caught:
        plain_loss(model, rank, 3).backward()
    assert caught.value.failed_ranks == (1,)
    del caught
    flush_engine()
    state["group"] = dist.new_group()
    model._update_process_group(state["group"])
    reference = mlp()
    for step in range(4, 6):
        model.zero_grad()
        plain_loss(model, rank, step).backward()
        assert_gradients(model.module, average_gradients(reference, plain_loss, step))


def _raise(_: object) -> None:
    raise KeyError("on purpose")


@ranks(2)
def test_a_hook_finds_bucket_views_in_the_gradients() -> None:
    """In every step, also when gradients are taken in by runs: it may step an optimizer on them."""
    model = px.DistributedDataParallel(mlp(), gradient_as_bucket_view=True)
    found: list[bool] = []

    def look(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        pointers = [gradient.data_ptr() for gradient in bucket.gradients()]
        found.append(pointers == [-1 if p.grad is None else p.grad.data_ptr() for p in bucket.parameters()])
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    model.register_comm_hook(None, look)
    for step in range(7):
        model.zero_grad()
        plain_loss(model, dist.get_rank(), step).backward()
    assert len(found) >= 7 and all(found), found
