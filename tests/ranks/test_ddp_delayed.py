"""`delay_all_reduce_named_params`: averages as without it, sent when the gradient that was named is there."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.pairs import BatchNormNet, Branches, image_loss, images
from tests.ranks.replicas import assert_gradients, average_gradients, batch, equal_on_all_ranks, mlp, plain_loss
from torch import nn

import phalanx as px
from phalanx import events
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.testing import ranks, run_ranks

EVERYWHERE = [(2, "gloo"), (3, "gloo"), (2, "phalanx"), (3, "phalanx")]
HEAD = ("4.weight", "4.bias")


def delaying(module: nn.Module, names: tuple[str, ...], trigger: str, **options: Any) -> px.DistributedDataParallel:
    parameters = dict(module.named_parameters())
    return px.DistributedDataParallel(
        module,
        delay_all_reduce_named_params=[(name, parameters[name]) for name in names],
        param_to_hook_all_reduce=parameters[trigger],
        **options,
    )


def check_averages() -> None:
    rank = dist.get_rank()
    every = tuple(name for name, _ in mlp().named_parameters())
    cases = [
        (HEAD, "0.weight", {}),
        (HEAD, "0.weight", {"gradient_as_bucket_view": True}),
        (HEAD, "0.weight", {"static_graph": True}),
        (HEAD, "0.weight", {"find_unused_parameters": True}),
        (("0.weight", "0.bias"), "0.weight", {}),  # the trigger is delayed itself
        (("0.weight", "0.bias"), "4.weight", {}),  # its gradient comes before theirs
        (every, "0.weight", {}),
    ]
    for names, trigger, options in cases:
        model, reference = delaying(mlp(), names, trigger, **options), mlp()
        for step in range(3):
            model.zero_grad(set_to_none=step != 1)
            plain_loss(model, rank, step).backward()
            assert_gradients(model.module, average_gradients(reference, plain_loss, step))


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
def test_gradients_are_averaged(world_size: int, backend: str) -> None:
    run_ranks(check_averages, world_size, backend=backend)


@ranks(2)
def test_parameters_of_rank_0_are_broadcast() -> None:
    model = delaying(mlp(seed=dist.get_rank()), HEAD, "0.weight")
    assert all(equal_on_all_ranks(parameter) for parameter in model.parameters())


def check_no_sync() -> None:
    """torch reduces delayed gradients in `no_sync` too, and adds the next ones to a reduction that is under way."""
    rank = dist.get_rank()
    model, reference = delaying(mlp(), HEAD, "0.weight"), mlp()
    with model.no_sync():
        plain_loss(model, rank, 0).backward()
    alone = mlp()
    plain_loss(alone, rank, 0).backward()
    torch.testing.assert_close(model.module[4].weight.grad, alone[4].weight.grad)
    plain_loss(model, rank, 1).backward()
    both = lambda m, r, s: plain_loss(m, r, 0) + plain_loss(m, r, 1)
    assert_gradients(model.module, average_gradients(reference, both, 0))


@pytest.mark.parametrize("world_size, backend", EVERYWHERE)
def test_no_sync_keeps_delayed_gradients_local(world_size: int, backend: str) -> None:
    run_ranks(check_no_sync, world_size, backend=backend)


@ranks(2)
def test_other_dtypes_and_sparse_gradients() -> None:
    """torch's buffer is of single precision and dense, whatever the parameters are."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2)).double()

    loss = lambda m, r, s: m(torch.arange(4) + r + s % 2).square().sum()
    model, reference = delaying(net(), ("0.weight", "2.weight"), "1.weight"), net()
    for step in range(3):
        model.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        expected = average_gradients(reference, loss, step)
        torch.testing.assert_close(model.module[0].weight.grad.to_dense(), expected["0.weight"].to_dense())
        torch.testing.assert_close(model.module[2].weight.grad, expected["2.weight"])


@ranks(2)
def test_the_reduction_starts_when_the_named_gradient_is_there() -> None:
    model = delaying(mlp(), HEAD, "2.weight", find_unused_parameters=True)  # so that its first step has buckets
    sent_when: list[str] = []

    def listener(event: events.Event) -> None:
        if isinstance(event, events.BucketLaunched) and "delayed" in event.module and event.bucket == 0:
            sent_when.append("sent")

    for index in (0, 2, 4):
        weight = model.module[index].weight
        weight.register_post_accumulate_grad_hook(lambda _, index=index: sent_when.append(f"{index}.weight"))
    stop = events.listen(listener)
    plain_loss(model, dist.get_rank(), 0).backward()
    stop()
    assert sent_when == [
        "4.weight",
        "sent",
        "2.weight",
        "0.weight",
    ]  # torch's hook on 2.weight is ours, which came first


@ranks(2)
def test_all_parameters_delayed_and_buffers() -> None:
    """torch 2.13 fails here, in its constructor or at the first forward."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    names = tuple(name for name, _ in BatchNormNet().named_parameters())
    model = delaying(BatchNormNet(), names, names[0])
    assert model._delay_all_reduce_all_params
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        image_loss(model, rank, step).backward()
        optimizer.step()
    assert all(equal_on_all_ranks(tensor) for tensor in model.parameters())
    model(images(rank, 5))  # buffers are rank 0's at the beginning of a forward
    with torch.no_grad():
        model.eval()
        model.require_forward_param_sync = True
        model(images(rank, 5))
    assert all(equal_on_all_ranks(buffer) for buffer in model.buffers())


@ranks(2)
def test_a_rank_whose_loss_reaches_none_of_it() -> None:
    rank = dist.get_rank()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step), (0,) if rank == 0 else (1,)).square().sum()

    names = ("branches.1.weight", "branches.1.bias")
    model, reference = delaying(Branches(), names, "stem.weight", find_unused_parameters=True), Branches()
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
        assert_gradients(model.module, average_gradients(reference, loss, step))


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_a_pass_that_raises_on_one_rank(backend: str) -> None:
    @ranks(3, backend=backend)
    def body() -> None:
        rank = dist.get_rank()
        model, reference = delaying(mlp(), HEAD, "0.weight"), mlp()
        plain_loss(model, rank, 0).backward()
        model.zero_grad()
        if rank == 1:
            hidden = torch.tanh(model.module[0](batch(rank)))
            hidden.register_hook(lambda _: 1 / 0)  # when all but the first layer have their gradients
            model.reducer.prepare_for_backward([])
            with pytest.raises(ZeroDivisionError):
                model.module[4](torch.tanh(model.module[2](hidden))).sum().backward()
        else:
            with pytest.raises(PeerFailedError, match="rank 1"):
                plain_loss(model, rank, 1).backward()
        for step in (2, 3):
            model.zero_grad()
            plain_loss(model, rank, step).backward()
            assert_gradients(model.module, average_gradients(reference, plain_loss, step))

    body()


@ranks(2)
def test_a_pickled_copy_delays_too() -> None:
    rank = dist.get_rank()
    every = tuple(name for name, _ in mlp().named_parameters())
    for names in (HEAD, every):
        model, reference = delaying(mlp(), names, "0.weight"), mlp()
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            plain_loss(twin, rank, 0).backward()
            assert_gradients(twin.module, average_gradients(reference, plain_loss, 0))


@ranks(3)
def test_another_process_group() -> None:
    rank = dist.get_rank()
    model, reference = delaying(mlp(), HEAD, "0.weight"), mlp()
    plain_loss(model, rank, 0).backward()
    some = dist.new_group([0, 1])
    model._update_process_group(some)
    if rank < 2:
        model.zero_grad()
        plain_loss(model, rank, 1).backward()
        assert_gradients(model.module, average_gradients(reference, plain_loss, 1, size=2))


@ranks(2)
def test_it_is_freed() -> None:
    model = delaying(mlp(), HEAD, "0.weight")
    plain_loss(model, dist.get_rank(), 0).backward()
    gone = [weakref.ref(model), weakref.ref(model.module[0].weight), weakref.ref(model.module[4].weight)]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    dist.barrier()


# -- bad input ----------------------------------------------------------------------------------------------------------

WRONG = {
    "one of the two": (lambda p: {"delay_all_reduce_named_params": [("0.weight", p["0.weight"])]}, "same time"),
    "no such name": (lambda p: _delay(("7.weight", p["0.weight"]), p["0.weight"]), "no parameter of that name"),
    "another's name": (lambda p: _delay(("4.weight", p["0.weight"]), p["0.weight"]), "another parameter has it"),
    "no pairs": (lambda p: _delay("0.weight", p["0.weight"]), r"list of \(name, parameter\)"),
    "no list": (lambda p: {"delay_all_reduce_named_params": 7, "param_to_hook_all_reduce": p["0.weight"]}, "list of"),
    "a trigger that is none": (
        lambda p: _delay(("0.weight", p["0.weight"]), "0.weight"),
        "requires a gradient, got str",
    ),
    "a trigger without gradient": (
        lambda p: _delay(("0.weight", p["0.weight"]), torch.ones(2)),
        "never gets a gradient",
    ),
}


def _delay(pair: Any, trigger: Any) -> dict[str, Any]:
    return {"delay_all_reduce_named_params": [pair], "param_to_hook_all_reduce": trigger}


def check_wrong(which: str, everywhere: bool) -> None:
    make, message = WRONG[which]
    module = mlp()
    options = make(dict(module.named_parameters())) if everywhere or dist.get_rank() == 1 else {}
    expected = (ValueError, TypeError) if options else PeerFailedError
    with pytest.raises(expected, match=message):
        px.DistributedDataParallel(module, **options)


@pytest.mark.parametrize("which", WRONG)
def test_wrong_arguments_on_one_rank_or_on_all(which: str) -> None:
    def body() -> None:
        check_wrong(which, everywhere=True)
        check_wrong(which, everywhere=False)

    run_ranks(body, 2)


@ranks(2)
def test_twice_and_frozen() -> None:
    module = mlp()
    weight = module[4].weight
    with pytest.raises(ValueError, match=r"'4\.weight' twice"):
        px.DistributedDataParallel(
            module, delay_all_reduce_named_params=[("4.weight", weight)] * 2, param_to_hook_all_reduce=weight
        )
    weight.requires_grad_(False)
    with pytest.raises(ValueError, match="does not require a gradient"):
        delaying(module, ("4.weight",), "0.weight")


@ranks(2)
def test_ranks_that_delay_other_parameters_are_told() -> None:
    names = HEAD if dist.get_rank() == 0 else ("2.weight",)
    with pytest.raises(MismatchError):
        delaying(mlp(), names, "0.weight")


@ranks(2)
def test_join_is_refused() -> None:
    model = delaying(mlp(), HEAD, "0.weight")
    with pytest.raises(ValueError, match="join cannot be used with delay_all_reduce_named_params"), model.join():
        pass
