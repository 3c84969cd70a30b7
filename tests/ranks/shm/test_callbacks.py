"""What hangs on a work's future may use the group again, and wait: communication hooks do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.testing import ranks


def started(tensor: torch.Tensor) -> torch.futures.Future[list[torch.Tensor]]:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


@ranks(2, backend="phalanx", timeout_s=15)
def test_a_callback_waits_for_a_call_of_its_own() -> None:
    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        deeper = started(future.value()[0]).then(lambda inner: started(inner.value()[0]).wait()[0])
        return deeper.wait()

    for _ in range(3):
        assert started(torch.ones(4)).then(again).wait().tolist() == [8.0] * 4


@ranks(2, backend="phalanx", timeout_s=15)
def test_a_callback_waits_for_a_call_that_was_queued_before() -> None:
    for _ in range(20):
        first, second = torch.ones(70_000), torch.ones(3)
        one, two = started(first), started(second)
        assert one.then(lambda _, two=two: two.wait()[0]).wait().tolist() == [2.0] * 3


@ranks(2, backend="phalanx", timeout_s=15)
def test_calls_after_callbacks_stay_in_order() -> None:
    """Several workers, but one call at a time, each in its turn."""
    for round_ in range(10):
        futures = [started(torch.full((n + 1,), float(round_))).then(lambda f: f.value()[0]) for n in range(8)]
        whole = torch.ones(5)
        dist.all_reduce(whole)
        assert whole.tolist() == [2.0] * 5
        for n, future in enumerate(futures):
            assert future.wait().tolist() == [2.0 * round_] * (n + 1)


@ranks(2, backend="phalanx", timeout_s=15)
def test_a_callback_that_makes_a_plain_call() -> None:
    def plain(_: object) -> torch.Tensor:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return tensor

    assert started(torch.ones(2)).then(plain).wait().tolist() == [2.0, 2.0]
