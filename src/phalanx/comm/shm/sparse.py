"""The sum of sparse tensors: every rank gathers all indices and values, and adds them in rank order."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.shm.arguments import ArgumentError, as_bytes
from phalanx.comm.shm.local import Collectives
from phalanx.comm.shm.wire import signature


def all_reduce(ops: Collectives, tensor: Tensor, rank: int, size: int, *, timeout_s: float) -> None:
    """`tensor` becomes the coalesced sum. Size, dtype and number of sparse dimensions agree on every rank."""
    own = tensor.detach().coalesce()
    note = f"{tensor.dtype}{list(tensor.shape)} with {own.sparse_dim()} sparse dimensions"
    if own.indices().dtype != torch.int64:
        raise ArgumentError(f"sparse all_reduce: expected int64 indices, got {own.indices().dtype}")

    counts = torch.zeros(size, dtype=torch.int64, device="cpu")
    said = signature("sparse_all_reduce", note=f"{note}: counts")
    ops.all_gather(
        as_bytes(torch.tensor([own._nnz()], device="cpu")),
        list(as_bytes(counts).view(size, 8)),
        timeout_s=timeout_s,
        signature=said,
    )

    def gathered(mine: Tensor, shapes: list[list[int]], what: str) -> list[Tensor]:
        places = [torch.empty(shape, dtype=mine.dtype, device="cpu") for shape in shapes]
        said = signature("sparse_all_reduce", note=f"{note}: {what}")
        flats = [as_bytes(p.view(-1)) for p in places]
        ops.all_gather(as_bytes(mine.contiguous().view(-1)), flats, timeout_s=timeout_s, signature=said)
        return places

    nnz = [int(n) for n in counts]
    indices = gathered(own.indices(), [[own.sparse_dim(), n] for n in nnz], "indices")
    values = gathered(own.values(), [[n, *own.values().shape[1:]] for n in nnz], "values")
    total = torch.sparse_coo_tensor(indices[0], values[0], tensor.shape, device="cpu")
    for index, value in zip(indices[1:], values[1:], strict=True):
        total = total + torch.sparse_coo_tensor(index, value, tensor.shape, device="cpu")
    tensor.copy_(total.coalesce())
