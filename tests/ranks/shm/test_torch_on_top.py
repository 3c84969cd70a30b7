"""What torch builds on a process group works on this one: DDP, functional collectives, DTensor, profiler, futures."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phalanx.comm import shm
from phalanx.errors import CollectiveTimeoutError, GroupAbortedError, PhalanxError
from phalanx.testing import ranks, run_ranks

shm.register()


def _group() -> Any:
    return dist.group.WORLD


@ranks(2, backend="phalanx")
def test_torchs_own_ddp_averages_gradients() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
    plain = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.ReLU(), torch.nn.Linear(300, 5))
    plain.load_state_dict(net.state_dict())
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.03)
    batches = [torch.randn(8, 50, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for _ in range(3):
        net.zero_grad()
        ddp(batches[dist.get_rank()]).square().mean().backward()
    plain(torch.cat(batches)).square().mean().backward()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("by_initial", [True, False])
def test_torchs_own_ddp_joins(by_initial: bool) -> None:
    """By the number of ranks that are left, torch's C++ asks a work for its future whose Python object is gone."""

    @ranks(2, backend="phalanx")
    def body(by_initial: bool) -> None:
        rank = dist.get_rank()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        seen = []
        with ddp.join(divide_by_initial_world_size=by_initial):
            for _ in range(2 + 2 * rank):
                ddp.zero_grad()
                ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
                seen.append(ddp.module.weight.grad[0, 0].item())
        assert seen == [1.5, 1.5, *([1.0, 1.0] if by_initial else [2.0, 2.0])][: 2 + 2 * rank]

    body(by_initial)


@ranks(2, backend="phalanx")
def test_torchs_own_ddp_raises_on_a_group_that_fails() -> None:
    """A future that fails by `set_exception` would end this process with a segmentation fault."""
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    ddp(torch.ones(2, 300)).sum().backward()
    dist.barrier()
    loss = ddp(torch.ones(2, 300)).sum()
    if dist.get_rank() == 1:
        _group().abort("rank 1 has had enough")
    else:
        with pytest.raises((PhalanxError, RuntimeError), match="rank 1 has had enough"):
            loss.backward()


@ranks(2, backend="phalanx")
def test_functional_collectives() -> None:
    rank = dist.get_rank()
    t = torch.full((4, 3), float(rank + 1))
    assert torch.equal(funcol.all_reduce(t, "sum", _group()) + 0, torch.full((4, 3), 3.0))
    assert torch.equal(
        funcol.all_gather_tensor(t, 0, _group()) + 0, torch.cat([torch.ones(4, 3), torch.ones(4, 3) * 2])
    )
    assert torch.equal(funcol.reduce_scatter_tensor(t, "sum", 0, _group()) + 0, torch.full((2, 3), 3.0))
    moved = funcol.all_to_all_single(t, None, None, _group()) + 0
    assert torch.equal(moved, torch.cat([torch.ones(2, 3), torch.ones(2, 3) * 2]))


@ranks(4, backend="phalanx")
def test_dtensor_on_a_mesh_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(64.0).view(8, 8)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert sharded.to_local().shape == (4, 4)
    assert torch.equal(sharded.full_tensor(), whole)
    product = sharded @ distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    assert torch.equal(product.full_tensor(), whole @ whole)


@ranks(2, backend="phalanx")
def test_each_call_shows_in_the_profiler_with_its_shapes_and_duration() -> None:
    big, small = torch.ones(1000, 300), torch.ones(4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as prof:
        dist.all_reduce(big)
        dist.broadcast(small, 0)
        dist.barrier()
        (dist.send if dist.get_rank() == 0 else dist.recv)(small, 1 - dist.get_rank())
        time.sleep(0.05)  # not part of any of them
    seen = {e.name: e for e in prof.events() if e.name.startswith("phalanx:")}
    assert seen["phalanx:all_reduce"].input_shapes == [[1000, 300]]
    assert seen["phalanx:broadcast"].input_shapes == [[4]]
    assert "phalanx:barrier" in seen and ("phalanx:send" in seen or "phalanx:recv" in seen)
    assert all(e.is_async and e.cpu_time < 45_000 for e in seen.values()), {n: e.cpu_time for n, e in seen.items()}


@ranks(2, backend="phalanx")
def test_futures_and_then() -> None:
    t = torch.ones(100_000)
    work = dist.all_reduce(t, async_op=True)
    halved = work.get_future().then(lambda f: f.value()[0] / 2)
    assert torch.equal(halved.wait(), torch.ones(100_000))
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert torch.equal(work.result()[0], t)


@ranks(2, backend="phalanx")
def test_a_synchronous_call_waits_for_queued_ones() -> None:
    tensors = [torch.full((200_000,), float(i)) for i in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    last = torch.ones(3)
    dist.all_reduce(last)
    assert all(w.is_completed() for w in works), "a synchronous call overtook queued ones"
    assert [t[0].item() for t in tensors] == [2.0 * i for i in range(8)]


@ranks(2, backend="phalanx")
def test_coalescing() -> None:
    ts = [torch.ones(3) * (i + 1) for i in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for t in ts:
            dist.all_reduce(t)
    manager.wait()
    assert [t[0].item() for t in ts] == [2.0, 4.0, 6.0]
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(ts[0], 0)
    assert ts[0][0].item() == 2.0


@ranks(2, backend="phalanx")
def test_abort_wakes_every_waiter_with_its_reason() -> None:
    group: Any = dist.new_group()
    dist.barrier(group)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        receive = dist.irecv(torch.ones(1), 1, group=group)
        dist.barrier()  # of the default group, which goes on
        for waiter in (work, receive):
            with pytest.raises(GroupAbortedError, match="rank 1 aborted the group: the step is void"):
                waiter.wait()
        began = time.monotonic()
        with pytest.raises(GroupAbortedError, match="the step is void"):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - began < 1.0
    else:
        dist.barrier()
        group.abort("the step is void")
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == 2.0
    again = dist.new_group()  # a group is replaceable
    dist.all_reduce(t, group=again)
    assert t.item() == 4.0


@ranks(2, backend="phalanx")
def test_abort_from_another_thread_wakes_this_ranks_own_call() -> None:
    group: Any = dist.new_group()
    dist.barrier(group)
    if dist.get_rank() == 0:
        timer = threading.Timer(0.1, group.abort, ["by a thread"])
        timer.start()
        with pytest.raises(GroupAbortedError, match="by a thread"):
            dist.all_reduce(torch.ones(10), group=group)
        timer.join()
    dist.barrier()


@ranks(2, backend="phalanx")
def test_timeouts_of_a_group_and_of_a_call() -> None:
    if dist.get_rank() == 0:
        slow: Any = dist.new_group(timeout=timedelta(seconds=60))
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"Timed out waiting 200ms for rank 1 in barrier #1.*no call"):
            dist.barrier(slow, timeout=timedelta(milliseconds=200))
        assert 0.19 < time.monotonic() - began < 1.5
    else:
        dist.new_group(timeout=timedelta(seconds=60))
    quick: Any = dist.new_group()
    quick.set_timeout(timedelta(milliseconds=300))
    if dist.get_rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match="300ms"):
            dist.all_reduce(torch.ones(100_000), group=quick)
    dist.barrier()


def _monitored(wait_all: bool) -> None:
    group: Any = dist.new_group()
    group.monitored_barrier(timedelta(seconds=10))
    if dist.get_rank() in (1, 2):
        dist.barrier()
        return
    with pytest.raises(CollectiveTimeoutError, match="ranks 1, 2 failed" if wait_all else "rank 1 failed"):
        group.monitored_barrier(timedelta(milliseconds=200), wait_all_ranks=wait_all)
    dist.barrier()


@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_who_is_missing(wait_all: bool) -> None:
    run_ranks(_monitored, 4, wait_all, backend="phalanx")


@ranks(2, backend="phalanx")
def test_unsupported_reductions_are_refused_before_anything_is_sent() -> None:
    refused = [(torch.float32, dist.ReduceOp.BAND), (torch.bool, dist.ReduceOp.AVG)]
    for dtype, op in refused:
        with pytest.raises(RuntimeError, match="Cannot use ReduceOp"):
            dist.all_reduce(torch.ones(3, dtype=dtype), op)
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.all_reduce(torch.ones(3, dtype=torch.float8_e5m2))
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t[0].item() == 2.0


@ranks(3, backend="phalanx")
def test_sparse_sums() -> None:
    rank = dist.get_rank()
    t = torch.sparse_coo_tensor(torch.tensor([[rank, 4]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (5, 2))
    dist.all_reduce(t)
    wanted = torch.tensor([[1.0, 2.0]] * 3 + [[0.0, 0.0], [9.0, 12.0]])
    assert torch.equal(t.to_dense(), wanted)


@ranks(3, backend="phalanx")
def test_messages_by_tag_from_any_source_and_of_any_size() -> None:
    rank = dist.get_rank()
    sizes = [1, 5000, 700_000]
    if rank == 0:
        got = {}
        for tag in (2, 1, 0):  # asked for in another order than sent
            for _ in range(2):
                t = torch.empty(sizes[tag])
                source = dist.recv(t, tag=tag)
                got[source, tag] = t
        assert sorted(got) == [(s, tag) for s in (1, 2) for tag in (0, 1, 2)]
        assert all(bool((t == 10 * s + tag).all()) for (s, tag), t in got.items())
    else:
        works = [dist.isend(torch.full((sizes[tag],), 10.0 * rank + tag), 0, tag=tag) for tag in (0, 1, 2)]
        for work in works:
            work.wait()
    strided = torch.zeros(4, 2)[:, 0]
    if rank == 1:
        dist.send(torch.arange(4.0), 2)
    elif rank == 2:
        dist.recv(strided, 1)
        assert torch.equal(strided, torch.arange(4.0))
    me = torch.zeros(2)
    requests = [dist.irecv(me, rank), dist.isend(torch.ones(2), rank)]  # to oneself
    for request in requests:
        request.wait()
    assert torch.equal(me, torch.ones(2))


def _tcp_sockets() -> set[str]:
    """Inodes of this process's TCP sockets."""
    known = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            known |= {line.split()[9] for line in file.readlines()[1:]}
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
    return known & mine


@ranks(2, backend=None)
def test_a_group_on_one_host_opens_no_tcp_connection_beyond_the_store() -> None:
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=20))  # type: ignore[attr-defined]
    dist.init_process_group("phalanx", store=dist.PrefixStore("a", store), rank=rank, world_size=2)  # type: ignore[attr-defined]
    before = _tcp_sockets()
    group: Any = dist.new_group()
    for numel in (1, 100_000):
        dist.all_reduce(torch.ones(numel), group=group)
        (dist.send if rank == 0 else dist.recv)(torch.ones(numel), group=group, **{("dst", "src")[rank]: 1 - rank})
    dist.barrier(group)
    assert group.hosts == [[0, 1]]
    assert _tcp_sockets() == before
    dist.barrier()
    dist.destroy_process_group()


@ranks(2, backend="phalanx")
def test_a_receive_that_nobody_answers_times_out() -> None:
    group: Any = dist.new_group(timeout=timedelta(milliseconds=300))
    if dist.get_rank() == 0:
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=r"recv from rank 1 of float32\[3\], tag 7"):
            dist.recv(torch.ones(3), 1, group=group, tag=7)
        assert 0.25 < time.monotonic() - began < 2.0
    dist.barrier()
