"""`SyncBatchNorm` inside models: wrapped, converted, checkpointed, saved."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from tests.ranks.normalized import batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import phalanx as px
from phalanx.testing import ranks, run_ranks

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    first = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    return nn.Sequential(*first, nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)).double()


def _images(rank: int, step: int) -> torch.Tensor:
    return batch(rank, 3, (2, 6, 6), torch.float64, step=step)


class _Checkpointed(nn.Module):
    def __init__(self, net: nn.Sequential, use_reentrant: bool) -> None:
        super().__init__()
        self.net, self.use_reentrant = net, use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()  # reentrant checkpointing gives no gradients otherwise
        hidden = checkpoint(self.net[:3], x, use_reentrant=self.use_reentrant)
        return self.net[5:](checkpoint(self.net[3:5], hidden, use_reentrant=self.use_reentrant))


def _wrapped(how: str, net: nn.Sequential) -> nn.Module:
    if how == "torch_ddp":  # it refuses SyncBatchNorm on the CPU where it is there already
        wrapped = TorchDDP(net)
        px.synchronize_batch_norm(wrapped.module)
        return wrapped
    assert px.SyncBatchNorm.convert_sync_batchnorm(net) is net
    if how == "ddp":
        return px.DistributedDataParallel(net)
    return px.replicate(net)


def _train(how: str) -> None:
    """Steps of a wrapped model are those of one process on all ranks' batches, also with checkpointing."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference, net = _net(), _net()
    model = _wrapped(how, net)
    if how == "checkpoint":
        run = _Checkpointed(net, use_reentrant=False)
    elif how == "reentrant":
        run = _Checkpointed(net, use_reentrant=True)
    else:
        run = model
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        run(_images(rank, step)).square().mean().backward()
        reference(torch.cat([_images(r, step) for r in range(world_size)])).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    twice = how in ("checkpoint", "reentrant")  # the running estimates see a recomputed batch again, as torch's do
    for name, wanted in reference.state_dict().items():
        if not (twice and ("running" in name or "tracked" in name)):
            torch.testing.assert_close(
                net.state_dict()[name], wanted, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
@pytest.mark.parametrize("how", ["ddp", "replicate", "torch_ddp", "checkpoint", "reentrant"])
def test_training_equals_one_process(how: str, backend: str) -> None:
    run_ranks(_train, 3 if how in ("ddp", "replicate") else 2, how, backend=backend)


@ranks(2)
def test_half_parameters_in_a_ddp() -> None:
    net = px.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4)).half())
    output = px.DistributedDataParallel(net)(torch.randn(3, 2, dtype=torch.float16))
    output.sum().backward()
    assert output.dtype == torch.float16
    assert [p.grad.dtype for p in net.parameters()] == [torch.float16] * 4


def test_conversion_keeps_what_it_finds() -> None:
    shared = nn.BatchNorm1d(3, momentum=None, eps=1e-3)
    net = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Sequential(nn.BatchNorm2d(2, affine=False).eval())})
    parameters = list(net.parameters())
    converted = px.SyncBatchNorm.convert_sync_batchnorm(net, process_group="group")
    assert converted is net and net["a"] is net["b"] and type(net["a"]) is px.SyncBatchNorm
    assert isinstance(net["a"], nn.SyncBatchNorm) and net["a"].process_group == "group"
    assert net["a"].momentum is None and net["a"].eps == 1e-3 and not net["c"][0].training
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert net["a"].running_mean.device.type == "cpu"
    single = px.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(2, dtype=torch.float64))
    assert type(single) is px.SyncBatchNorm and single.weight.dtype == torch.float64


def test_in_place_conversion_keeps_the_layers() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layer, calls = net[1], []
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert px.synchronize_batch_norm(net) is net
    assert net[1] is layer and type(layer) is px.SyncBatchNorm and layer.process_group is None
    net(torch.randn(4, 2))  # no process group: plain batch normalisation
    assert calls == [1] and layer.num_batches_tracked.item() == 1

    class Own(nn.BatchNorm1d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input

    with pytest.raises(ValueError, match="0 is a Own with a forward of its own"):
        px.synchronize_batch_norm(nn.Sequential(Own(2)))
    with pytest.raises(ValueError, match="is lazy"):
        px.synchronize_batch_norm(nn.LazyBatchNorm1d())
    with pytest.raises(TypeError, match="got int"):
        px.synchronize_batch_norm(3)  # type: ignore[type-var]


def test_state_goes_both_ways_and_through_files() -> None:
    ours, sync, plain = px.SyncBatchNorm(3), nn.SyncBatchNorm(3), nn.BatchNorm2d(3)
    ours(torch.randn(4, 3))
    for other in (sync, plain):
        other.load_state_dict(ours.state_dict())
        px.SyncBatchNorm(3).load_state_dict(other.state_dict())
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.running_mean, ours.running_mean) and type(copy.deepcopy(loaded)) is px.SyncBatchNorm
    assert px.SyncBatchNorm(3, bias=False).bias is None


@ranks(2, timeout_s=55, allow_leaks="torch.compile loads modules that keep the default process group")
def test_it_compiles() -> None:
    net = px.synchronize_batch_norm(_net())
    images = _images(dist.get_rank(), 0)
    expected = net(images)
    compiled = torch.compile(net, backend="eager")(images)
    torch.testing.assert_close(compiled, expected, **CLOSE)
    compiled.sum().backward()
    assert all(p.grad is not None for p in net.parameters())
