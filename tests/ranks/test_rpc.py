"""DDP in contexts of distributed autograd, beside torch's own class in the same ranks: the same gradients, bit for bit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from tests.ranks.pairs import Pair
from tests.ranks.replicas import average_gradients, batch, mlp, plain_loss
from tests.ranks.rpc_workers import alike, in_context, of_context, refusal, worker
from torch import nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx as px
from phalanx import events
from phalanx.testing import run_ranks

WORLDS = pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (2, "phalanx"), (3, "gloo"), (3, "phalanx")])
TWO = pytest.mark.parametrize("backend", ["gloo", "phalanx"])


def _close() -> dict[str, float]:
    """Two ranks add up to the same bits; more add up in an order that is the backend's."""
    return {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 2 else {"rtol": 1e-4, "atol": 1e-6}


class Bag(nn.Module):
    """Sparse gradients for a table, dense ones for the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.EmbeddingBag(12, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(rows))
        return out


class Branches(nn.Module):
    """Each call uses some of four layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, use: tuple[int, ...]) -> torch.Tensor:
        for index in use:
            x = self.layers[index](x).tanh()
        return x


class InRRef(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Any) -> Any:
        return RRef(self.inner(x.local_value() if isinstance(x, RRef) else x))


# -- one process's graph ------------------------------------------------------------------------------------------------


@WORLDS
def test_gradients_are_averaged_in_the_context(world_size: int, backend: str, tmp_path: Any) -> None:
    run_ranks(_averaged, world_size, str(tmp_path), backend=backend)


def _averaged(folder: str) -> None:
    with worker(folder) as rank:
        pair = Pair.of(mlp, bucket_cap_mb=0.0001)
        for step in range(3):
            mine, theirs = (in_context(m, lambda m, s=step: plain_loss(m, rank, s)) for m in pair.both())
            alike(mine, theirs, **_close())
            assert all(parameter.grad is None for parameter in pair.ours.parameters())
            for model in pair.both():  # and outside of any context in between
                plain_loss(model, rank, step + 50).backward()
            pair.compare_gradients(f"after step {step}", **_close())
            pair.ours.zero_grad()
            pair.theirs.zero_grad()

        tables = Pair.of(Bag)
        rows = torch.tensor([[rank, rank + 1, 7], [5, rank, 9]])
        mine, theirs = (in_context(m, lambda m: m(rows).square().sum()) for m in tables.both())
        assert mine["module.table.weight"].is_sparse
        alike(mine, theirs, **_close())


@WORLDS
def test_unused_parameters(world_size: int, backend: str, tmp_path: Any) -> None:
    run_ranks(_unused, world_size, str(tmp_path), backend=backend)


def _unused(folder: str) -> None:
    with worker(folder) as rank:
        # Not beside torch's class, which fails on an assertion of its own there.
        model = px.DistributedDataParallel(Branches(), find_unused_parameters=True)
        reference = Branches()
        for step, uses in enumerate([((0, 1), (0, 2), (0,)), ((0,), (1,), ()), ((3, 2), (3, 2), (3, 2))]):

            def loss(m: nn.Module, r: int, s: int, uses: Any = uses) -> torch.Tensor:
                # a rank that uses none of the parameters still has to come: by an input that needs a gradient
                out: torch.Tensor = m(batch(r, s).requires_grad_(), uses[r]).square().sum()
                return out

            mine = in_context(model.module, lambda _, s=step: loss(model, rank, s))
            expected = average_gradients(reference, loss, step)
            used = sorted({index for use in uses[: dist.get_world_size()] for index in use})
            assert list(mine) == [f"layers.{index}.{kind}" for index in used for kind in ("weight", "bias")]
            alike(mine, {name: g for name, g in expected.items() if g is not None}, rtol=1e-4, atol=1e-5)


@WORLDS
def test_uneven_inputs(world_size: int, backend: str, tmp_path: Any) -> None:
    run_ranks(_uneven, world_size, str(tmp_path), backend=backend)


def _uneven(folder: str) -> None:
    with worker(folder) as rank:
        for by_initial_size in (True, False):
            # On Gloo: under join, torch's class cannot use a group that is written in Python in a context.
            gloo = dist.new_group(backend="gloo")
            pair = Pair(px.DistributedDataParallel(mlp()), TorchDDP(mlp(), process_group=gloo))
            seen: list[list[dict[str, torch.Tensor]]] = []
            for model in pair.both():
                seen.append([])
                with model.join(divide_by_initial_world_size=by_initial_size):
                    for step in range(2 + rank):
                        seen[-1].append(in_context(model, lambda m, s=step: plain_loss(m, rank, s)))
                        plain_loss(model, rank, step).backward()
                        model.zero_grad()
            for mine, theirs in zip(*seen, strict=True):
                alike(mine, theirs, **_close())


@TWO
def test_options_and_shapes_of_output(backend: str, tmp_path: Any) -> None:
    run_ranks(_options, 2, str(tmp_path), backend=backend)


def _options(folder: str) -> None:
    with worker(folder) as rank:
        hooked = Pair.of(mlp, bucket_cap_mb=0.0001)
        for model in hooked.both():
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        views = Pair.of(mlp, gradient_as_bucket_view=True)
        static = Pair.of(mlp, static_graph=True)
        for step in range(2):
            for pair in (hooked, views):
                mine, theirs = (in_context(m, lambda m, s=step: plain_loss(m, rank, s)) for m in pair.both())
                alike(mine, theirs)
        mine = in_context(static.ours, lambda m: plain_loss(m, rank, 0))
        alike(mine, in_context(views.ours, lambda m: plain_loss(m, rank, 0)))

        # Gradients that were kept local are averaged by the next pass in the same context.
        kept: list[dict[str, torch.Tensor]] = []
        for model in Pair.of(mlp).both():
            with dist_autograd.context() as context:
                with model.no_sync():
                    dist_autograd.backward(context, [plain_loss(model, rank, 0)])
                local = of_context(model, context)
                dist_autograd.backward(context, [plain_loss(model, rank, 1)])
                kept += [local, of_context(model, context)]
        alike(kept[0], kept[2])
        alike(kept[1], kept[3])

        # References in and out.
        refs = Pair.of(InRRef)
        mine, theirs = (in_context(m, lambda m: m(RRef(batch(rank))).to_here().square().sum()) for m in refs.both())
        alike(mine, theirs)
        assert len(mine) == 6


def test_buckets_leave_while_the_pass_goes_on(tmp_path: Any) -> None:
    run_ranks(_overlapped, 2, str(tmp_path))


def _overlapped(folder: str) -> None:
    with worker(folder) as rank:
        model = px.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
        with events.recorded() as seen:
            in_context(model, lambda m: plain_loss(m, rank, 0))
        kinds = [type(event).__name__ for event in seen]
        assert kinds.index("BucketLaunched") < len(kinds) - 1 - kinds[::-1].index("GradientReady"), kinds
        assert kinds[-1] == "StepFinalized"


# -- graphs over several workers ----------------------------------------------------------------------------------------


class Hybrid(nn.Module):
    """A remote table, a local layer, a remote layer, a local layer."""

    def __init__(self, table: RemoteModule, middle: RemoteModule) -> None:
        super().__init__()
        self._remote = (table, middle)
        self.before = nn.Linear(4, 4)
        self.after = nn.Linear(4, 2)
        _filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        table, middle = self._remote
        out: torch.Tensor = self.after(middle(self.before(table(rows)).tanh()).tanh())
        return out


@WORLDS
def test_a_hybrid_model_trains_as_with_torch(world_size: int, backend: str, tmp_path: Any) -> None:
    run_ranks(_hybrid, world_size, str(tmp_path), backend=backend)


def _filled(module: nn.Module) -> None:
    """Not from the random numbers that all threads of a process share: several remote parts are made at once."""
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


class Table(nn.EmbeddingBag):
    def __init__(self) -> None:
        super().__init__(10, 4)
        _filled(self)


class Middle(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        _filled(self)


def _hybrid(folder: str) -> None:
    with worker(folder) as rank:

        def make() -> nn.Module:
            # Each trainer has remote parts of its own, on another rank, so that both runs can be compared.
            owner = f"rank{(rank + 1) % dist.get_world_size()}"
            table = RemoteModule(owner, Table)
            middle = RemoteModule(owner, Middle)
            return Hybrid(table, middle)

        pair = Pair.of(make)
        losses: list[list[float]] = []
        for model in pair.both():
            remote = [reference for part in model.module._remote for reference in part.remote_parameters()]
            local = [RRef(parameter) for parameter in model.parameters()]
            optimizer = DistributedOptimizer(torch.optim.SGD, remote + local, lr=0.1)
            losses.append([])
            for step in range(3):
                rows = (torch.arange(6).reshape(3, 2) + rank + step) % 10
                with dist_autograd.context() as context:
                    loss = model(rows).square().sum()
                    dist_autograd.backward(context, [loss])
                    optimizer.step(context)
                losses[-1].append(loss.item())
        torch.testing.assert_close(losses[0], losses[1], **_close())
        pair.compare_state("at the end", **_close())
        assert losses[0][2] < losses[0][0]
        dist.barrier()  # remote parts are on ranks that must not leave yet


# -- several contexts ---------------------------------------------------------------------------------------------------


def test_several_contexts_are_open_at_once(tmp_path: Any) -> None:
    run_ranks(_several, 2, str(tmp_path))


def _several(folder: str) -> None:
    with worker(folder) as rank:
        model = px.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
        results: dict[int, dict[str, torch.Tensor]] = {}
        forward_over = [threading.Event(), threading.Event()]
        second_over = threading.Event()

        def run(number: int) -> None:
            """A thread is in one context at a time. Forward in order, and backward the other way round, on all ranks."""
            with dist_autograd.context() as context:
                if number == 1:
                    forward_over[0].wait()
                loss = plain_loss(model, rank, number)
                forward_over[number].set()
                (second_over if number == 0 else forward_over[1]).wait()
                dist_autograd.backward(context, [loss])
                results[number] = of_context(model.module, context)
                second_over.set()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(2):
            expected = average_gradients(mlp(), plain_loss, number)
            alike(results[number], {name: g for name, g in expected.items() if g is not None}, rtol=1e-5, atol=1e-6)


class Crossing(torch.autograd.Function):
    """Lets the pass of one context wait here, in backward, until the other's has come by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        first = dist.get_rank()  # on rank 0 the pass of context 0 comes first, on rank 1 that of context 1
        if ctx.number != first:
            assert TRAINER.finished[first].wait(10)
        return gradient, None


class Trainer:
    """What the master calls on each rank."""

    def __init__(self) -> None:
        self.model = px.DistributedDataParallel(mlp(), bucket_cap_mb=0.0001)
        self.finished = [threading.Event(), threading.Event()]
        self.keep = torch.autograd.graph.get_gradient_edge(self.model.module[0].weight).node
        over = self.finished[dist.get_rank()]
        self.keep.register_hook(lambda *_: over.set())  # when a pass has come to the end of the model


TRAINER: Trainer


def _forward_on_trainer(number: int) -> torch.Tensor:
    out = TRAINER.model(Crossing.apply(batch(dist.get_rank(), number), number))
    return Crossing.apply(out, number).square().sum()


def _gradients_on_trainer(context: int) -> dict[str, torch.Tensor]:
    return of_context(TRAINER.model.module, context)


@TWO
def test_passes_that_reach_the_ranks_in_another_order(backend: str, tmp_path: Any) -> None:
    """A master opens two contexts, each over both trainers; on each trainer another one's backward is over first."""
    run_ranks(_crossed, 2, str(tmp_path), backend=backend)


def _crossed(folder: str) -> None:
    global TRAINER
    torch.set_num_interop_threads(6)
    with worker(folder) as rank:
        TRAINER = Trainer()
        dist.barrier()
        results: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

        def run(number: int) -> None:
            with dist_autograd.context() as context:
                futures = [rpc.rpc_async(f"rank{r}", _forward_on_trainer, args=(number,)) for r in range(2)]
                dist_autograd.backward(context, [torch.stack([future.wait() for future in futures]).sum()])
                for r in range(2):
                    results[number, r] = rpc.rpc_sync(f"rank{r}", _gradients_on_trainer, args=(context,))

        if rank == 0:
            threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for number in range(2):
                expected = average_gradients(mlp(), plain_loss, number, size=2)
                for r in range(2):
                    dense = {name: g for name, g in expected.items() if g is not None}
                    alike(results[number, r], dense, rtol=1e-5, atol=1e-6)
        dist.barrier()
        del TRAINER


# -- a pass that raises -------------------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient today")


class RaisesAtTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, *, raises: bool) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.second(Raises.apply(x) if raises else x)
        return out


@WORLDS
def test_a_pass_that_raises_is_known_to_all_and_training_goes_on(world_size: int, backend: str, tmp_path: Any) -> None:
    run_ranks(_raises, world_size, str(tmp_path), backend=backend)


def _raises(folder: str) -> None:
    with worker(folder) as rank:
        model = px.DistributedDataParallel(RaisesAtTimes(), bucket_cap_mb=0.0001)
        reference = RaisesAtTimes()
        for step in range(3):
            said = ""
            if step == 1:
                said = refusal(
                    lambda s=step: in_context(model, lambda m: m(batch(rank, s), raises=rank == 1).square().sum())
                )
                assert ("no gradient today" if rank == 1 else "rank 1 raised in its backward pass") in said, said
                continue
            mine = in_context(model.module, lambda _, s=step: model(batch(rank, s), raises=False).square().sum())
            expected = average_gradients(reference, lambda m, r, s: m(batch(r, s), raises=False).square().sum(), step)
            alike(mine, {name: g for name, g in expected.items() if g is not None}, rtol=1e-4, atol=1e-5)
