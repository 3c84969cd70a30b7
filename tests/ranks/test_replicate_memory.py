"""The memory bound: what `.grad`, buckets and pending copies hold is at most the gradients and one bucket."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx as px
from phalanx import events
from phalanx.api.replica import replica_of
from phalanx.testing import ranks

WIDTH, LAYERS, BUCKET = 64, 8, 3 * 64 * 64 * 4


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def held_bytes(model: nn.Module) -> int:
    """Bytes of the distinct storages that gradients, buckets and pending copies reach."""
    reducer = replica_of(model).reducer
    tensors = [p.grad for p in model.parameters() if p.grad is not None]
    for bucket in reducer.buckets:
        tensors.append(bucket.buffer)
    for slot in reducer.slots:
        tensors += [t for t in (slot.late, slot.stale) if t is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def storages_alive() -> int:
    """All float storages of this process that are not parameters: also what no list above knows of."""
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, nn.Parameter):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("unused", [False, True])
@ranks(2)
def test_at_every_event_at_most_the_gradients_and_one_bucket(unused: bool) -> None:
    rank = dist.get_rank()
    model = px.replicate(deep(), bucket_bytes=BUCKET, first_bucket_bytes=BUCKET // 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    reducer = replica_of(model).reducer
    seen: list[tuple[str, int]] = []
    stop = events.listen(lambda event: seen.append((type(event).__name__, held_bytes(model))))
    for step in range(5):
        h = torch.randn(4, WIDTH)
        for number, layer in enumerate(model):
            if not (unused and number == (step + rank) % LAYERS):
                h = torch.tanh(layer(h))
        h.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(("after the step", held_bytes(model)))
    stop()
    one_bucket = max(b.buffer.numel() * b.buffer.element_size() for b in reducer.buckets)
    assert len(reducer.buckets) >= 3
    assert len({name for name, _ in seen}) >= 6  # every kind of event was sampled
    assert max(held for _, held in seen) <= of_gradients + one_bucket, seen
    assert max(held for _, held in seen) >= of_gradients  # and the samples do measure something


@ranks(2)
def test_steady_state_holds_the_buckets_alone_and_allocates_none() -> None:
    model = px.replicate(deep(), bucket_bytes=BUCKET, first_bucket_bytes=BUCKET // 3)
    of_gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    addresses = []
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(4, WIDTH)).sum().backward()
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
    gc.collect()
    assert addresses[-1] == addresses[-2]  # the same memory in every step
    whole_pages = 4096 * len(replica_of(model).reducer.buckets)  # what groups with memory of their own round up to
    assert of_gradients <= held_bytes(model) <= of_gradients + whole_pages
    assert storages_alive() <= of_gradients + 16384
