"""torch.compile around, inside of and in place on what is replicated: no graph break, pieces that end where buckets do."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from tests.ranks.compiled import (
    NUM_LAYERS,
    SMALL,
    Net,
    Pieces,
    Recompilations,
    batch,
    graph_breaks,
    launches,
    losses_alone,
    train,
)
from torch import nn

import phalanx as px
from phalanx import events
from phalanx.testing import run_ranks

TorchDDP = torch.nn.parallel.DistributedDataParallel
CAP_MB = SMALL["bucket_bytes"] / 2**20


def wrapped(kind: str, net: nn.Module, backend: Any = "aot_eager") -> nn.Module:
    """`compile_replicate` is compile(replicate(net)), and so on."""
    if kind == "compile_replicate":
        return torch.compile(px.replicate(net, **SMALL), backend=backend, fullgraph=True)
    if kind == "replicate_compile":
        return px.replicate(torch.compile(net, backend=backend, fullgraph=True), **SMALL)
    if kind == "replicate_in_place":
        px.replicate(net, **SMALL).compile(backend=backend, fullgraph=True)
        return net
    if kind == "in_place_replicate":
        net.compile(backend=backend, fullgraph=True)
        return px.replicate(net, **SMALL)
    if kind == "compile_ddp":
        return torch.compile(px.DistributedDataParallel(net, bucket_cap_mb=CAP_MB), backend=backend)
    assert kind == "ddp_compile"
    return px.DistributedDataParallel(torch.compile(net, backend=backend, fullgraph=True), bucket_cap_mb=CAP_MB)


REPLICATED = ("compile_replicate", "replicate_compile", "replicate_in_place", "in_place_replicate")
KINDS = (*REPLICATED, "compile_ddp", "ddp_compile")


@pytest.mark.parametrize("kind", KINDS)
def test_losses_breaks_and_pieces(kind: str) -> None:
    run_ranks(_losses_breaks_and_pieces, 2, kind)


def _losses_breaks_and_pieces(kind: str) -> None:
    rank, net, pieces, captured = dist.get_rank(), Net(), Pieces(), Recompilations()
    model = wrapped(kind, net, pieces.backend)
    losses = train(model, net, rank, after_step=captured.after_step)
    assert losses == pytest.approx(losses_alone(rank), rel=1e-5)
    assert graph_breaks() == 0
    assert captured.number == 0
    assert captured.graphs == [1, 1, 1, 1]
    assert pieces.num_forward == NUM_LAYERS
    pieces.ended_at_s.clear()
    with events.recorded() as seen:
        model(batch(rank, 9)).sum().backward()
    assert len(pieces.ended_at_s) == NUM_LAYERS
    before_the_end = [at for at in launches(seen) if at < pieces.ended_at_s[-1]]
    assert len(before_the_end) >= NUM_LAYERS - 2  # the last two leave when the first layer's gradients have come


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_three_ranks(backend: str) -> None:
    run_ranks(_three_ranks, 3, backend=backend)


def _three_ranks() -> None:
    rank, net = dist.get_rank(), Net()
    losses = train(wrapped("compile_replicate", net), net, rank)
    assert losses == pytest.approx(losses_alone(rank, world_size=3), rel=1e-5)


def test_ddp_is_torchs() -> None:
    run_ranks(_ddp_is_torchs, 2)


def _ddp_is_torchs() -> None:
    rank, ours, theirs = dist.get_rank(), Net(), Net()
    found = train(wrapped("compile_ddp", ours), ours, rank)
    # With a cap as small as ours torch's own does not compile.
    assert found == train(torch.compile(TorchDDP(theirs), backend="aot_eager"), theirs, rank)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("mode", "num_pieces"), [("ddp_optimizer", NUM_LAYERS), (False, 1), ("no_optimization", 1)])
def test_the_setting_is_honoured(mode: bool | str, num_pieces: int) -> None:
    run_ranks(_the_setting_is_honoured, 2, mode, num_pieces)


def _the_setting_is_honoured(mode: bool | str, num_pieces: int) -> None:
    rank = dist.get_rank()
    with torch._dynamo.config.patch(optimize_ddp=mode):
        for kind in ("compile_replicate", "ddp_compile"):
            net, pieces = Net(), Pieces()
            losses = train(wrapped(kind, net, pieces.backend), net, rank, steps=2)
            assert losses == pytest.approx(losses_alone(rank, steps=2), rel=1e-5)
            assert pieces.num_forward == num_pieces


def test_splits_are_logged() -> None:
    run_ranks(_splits_are_logged, 2)


def _splits_are_logged() -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    torch._logging.set_logs(ddp_graphs=True)
    logger = logging.getLogger("torch._dynamo.backends.distributed.__ddp_graphs")
    logger.handlers[:] = [Kept()]
    net = Net()
    train(wrapped("compile_replicate", net), net, dist.get_rank(), steps=1)
    assert "---split graph---" in "\n".join(lines)
    assert f"submod_{NUM_LAYERS - 1} graph" in "\n".join(lines)


@pytest.mark.parametrize("kind", ["compile_replicate", "ddp_compile"])
def test_dynamic_shapes(kind: str) -> None:
    run_ranks(_dynamic_shapes, 2, kind)


def _dynamic_shapes(kind: str) -> None:
    rank, net, captured = dist.get_rank(), Net(), Recompilations()
    sizes = (6, 5, 7, 3, 9)
    losses = train(wrapped(kind, net), net, rank, steps=5, sizes=sizes, after_step=captured.after_step)
    assert losses == pytest.approx(losses_alone(rank, steps=5, sizes=sizes), rel=1e-5)
    assert captured.number == 0


@pytest.mark.parametrize("kind", ["compile_ddp", "ddp_compile"])
def test_another_group_compiles_nothing(kind: str) -> None:
    run_ranks(_another_group_compiles_nothing, 2, kind)


def _another_group_compiles_nothing(kind: str) -> None:
    rank, net, captured = dist.get_rank(), Net(), Recompilations()
    model = wrapped(kind, net)
    group = dist.new_group([0, 1])

    def replace(step: int) -> None:
        if step == 2:
            (model if kind == "ddp_compile" else model._orig_mod)._update_process_group(group)
        captured.after_step(step)

    losses = train(model, net, rank, steps=5, after_step=replace)
    assert losses == pytest.approx(losses_alone(rank, steps=5), rel=1e-5)
    assert captured.number == 0


def test_static_graph() -> None:
    run_ranks(_static_graph, 2)


def _static_graph() -> None:
    rank, net, pieces = dist.get_rank(), Net(), Pieces()
    ddp = px.DistributedDataParallel(net, bucket_cap_mb=CAP_MB, static_graph=True)
    losses = train(torch.compile(ddp, backend=pieces.backend), net, rank)
    assert losses == pytest.approx(losses_alone(rank), rel=1e-5)
    assert pieces.num_forward == NUM_LAYERS
    assert graph_breaks() == 0


def test_what_is_not_averaged_is_not_split() -> None:
    run_ranks(_what_is_not_averaged_is_not_split, 2)


def _what_is_not_averaged_is_not_split() -> None:
    net, other, pieces = Net(), Net(1), Pieces()
    replicated = wrapped("compile_replicate", net)
    alone = torch.compile(other, backend=pieces.backend, fullgraph=True)
    alone(batch(0, 0)).sum().backward()
    assert pieces.num_forward == 1
    evaluated = Pieces()
    with torch.no_grad():
        torch.compile(net, backend=evaluated.backend, fullgraph=True)(batch(0, 0))
    assert evaluated.num_forward <= 1  # no backward follows; without one there may be no forward graph at all
    px.unreplicate(net)
    torch._dynamo.reset()
    after = Pieces()
    torch.compile(net, backend=after.backend, fullgraph=True)(batch(0, 0)).sum().backward()
    assert after.num_forward == 1
    del replicated


def test_a_loss_in_the_graph_and_several_modules() -> None:
    run_ranks(_a_loss_in_the_graph_and_several_modules, 2)


def _a_loss_in_the_graph_and_several_modules() -> None:
    rank, first, second, pieces = dist.get_rank(), px.replicate(Net(), **SMALL), px.replicate(Net(1), **SMALL), Pieces()

    @torch.compile(backend=pieces.backend, fullgraph=True)
    def loss_of(inputs: torch.Tensor) -> torch.Tensor:
        return second(first(inputs)).square().mean()

    for step in range(3):
        loss_of(batch(rank, step)).backward()
    one, two = Net(), Net(1)
    for step in range(3):
        torch.stack([two(one(batch(r, step))).square().mean() for r in range(2)]).mean().backward()
    for got, wanted in zip(
        (*first.parameters(), *second.parameters()), (*one.parameters(), *two.parameters()), strict=True
    ):
        torch.testing.assert_close(got.grad, wanted.grad)
    assert graph_breaks() == 0
    assert pieces.num_forward == 2 * NUM_LAYERS


def test_inductor() -> None:
    run_ranks(_inductor, 2, timeout_s=110)


def _inductor() -> None:
    rank, net = dist.get_rank(), Net()
    with torch._inductor.config.patch(compile_threads=1):  # its pool of threads would outlive the test
        losses = train(wrapped("compile_replicate", net, "inductor"), net, rank)
    assert losses == pytest.approx(losses_alone(rank), rel=1e-4)
    assert graph_breaks() == 0


def test_a_compiled_model_is_replicated_once() -> None:
    run_ranks(_a_compiled_model_is_replicated_once, 2)


def _a_compiled_model_is_replicated_once() -> None:
    net = Net()
    compiled = px.replicate(torch.compile(net, backend="eager"))
    for again in (compiled, net):
        with pytest.raises(ValueError, match=r"is already replicated.*unreplicate first"):
            px.replicate(again)
    other = torch.compile(px.replicate(Net()), backend="eager")
    with pytest.raises(ValueError, match=r"is already replicated"):
        px.replicate(other)


def test_fully_sharded_parts() -> None:
    run_ranks(_fully_sharded_parts, 2, allow_leaks="fully_shard keeps its mesh, and with it the group")


def _fully_sharded_parts() -> None:
    from torch.distributed.fsdp import fully_shard

    inside = Net()
    fully_shard(inside.layers[0])
    with pytest.raises(ValueError, match="hold different parts"):
        px.replicate(inside)
    rank, beside = dist.get_rank(), Net()
    fully_shard(beside.layers[0])
    px.replicate(beside, ignore=[name for name, _ in beside.named_parameters() if name.startswith("layers.0")], **SMALL)
    assert train(beside, beside, rank) == pytest.approx(losses_alone(rank), rel=1e-5)
