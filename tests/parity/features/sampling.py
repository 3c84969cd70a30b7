"""`DistributedSampler` beside torch's, through a save in mid-epoch, and `gather_exact` beside one process."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from tests.parity.features.sides import Sides
from tests.ranks.replicas import mlp
from torch.utils.data import DataLoader
from torch.utils.data import DistributedSampler as TorchSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import phalanx as px

LENGTH, BATCH_SIZE = 23, 2
DATA: Any = range(LENGTH)


def _everyones(mine: list[int]) -> list[int]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return [index for part in parts for index in part]


def epochs_as_with_torch(sides: Sides) -> None:
    for options in ({}, {"drop_last": True}, {"shuffle": False}, {"seed": 5}):
        mine, other = px.DistributedSampler(DATA, **options), TorchSampler(DATA, **options)
        loaders = [DataLoader(DATA, BATCH_SIZE, sampler=sampler) for sampler in (mine, other)]
        for epoch in range(2):
            other.set_epoch(epoch)  # ours goes on by itself
            first, second = ([batch.tolist() for batch in loader] for loader in loaders)
            assert first == second, f"{options}, epoch {epoch}"


def resumed_in_mid_epoch(sides: Sides) -> None:
    """Every sample once, before and after the save together; the padding is that of a run without a save."""
    whole = px.DistributedSampler(DATA)
    padded = Counter(_everyones(list(whole)))
    for kind in ("track", "torchdata"):
        used: list[int] = []
        state = None
        for num_batches in (2, None):
            sampler = px.DistributedSampler(DATA)
            if kind == "track":
                loader = DataLoader(DATA, BATCH_SIZE, sampler=sampler)
                holder, batches = sampler, sampler.track(loader)
            else:
                holder = batches = StatefulDataLoader(DATA, BATCH_SIZE, sampler=sampler)
            if state is not None:
                holder.load_state_dict(state)
            for batch in itertools.islice(batches, num_batches):
                used += batch.tolist()
            states: list[Any] = [None] * sides.size
            dist.all_gather_object(states, holder.state_dict())
            state = states[0]  # a checkpoint is rank 0's
        assert Counter(_everyones(used)) == padded, kind
        assert set(padded) == set(range(LENGTH))


def metrics_over_unpadded_shards(sides: Sides) -> None:
    """Predictions of all samples, by turns, by the sampler and by explicit indices: one process's, row by row."""
    inputs = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(0))
    model = mlp().eval()
    with torch.no_grad():
        whole = model(inputs)
        for options in ({"shuffle": False, "pad": False}, {"pad": False}, {}):
            sampler = px.DistributedSampler(DATA, **options)
            rows = torch.cat(list(DataLoader(DATA, BATCH_SIZE, sampler=sampler)))
            mine = {"logits": model(inputs[rows]), "row": rows}
            told = [{"sampler": sampler}, {"indices": rows}] + ([{}] if options.get("shuffle") is False else [])
            for how in told:
                got = px.gather_exact(mine, **how)
                assert got["row"].tolist() == list(range(LENGTH)), f"{options}, {list(how)}"
                torch.testing.assert_close(got["logits"], whole, rtol=1e-6, atol=1e-6)


CHECKS = (epochs_as_with_torch, resumed_in_mid_epoch, metrics_over_unpadded_shards)
