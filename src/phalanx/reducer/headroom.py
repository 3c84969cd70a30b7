"""On a GPU: how much memory is free when a gradient comes, below the most that is in use in a backward pass.

Gradients that are taken in together lie beside their bucket until the last of them is there. A backward pass begins when
most memory is in use, and frees what forward has kept as it goes on: where there is room below that peak, gradients may
wait without making the peak higher.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from phalanx.reducer.bucket import ParameterSlot


def in_use(device: torch.device) -> int:
    """Bytes in use now; zero on the CPU, where nobody counts them, and under an allocator that does not."""
    if device.type != "cuda":
        return 0
    try:
        stats = torch.cuda.memory_stats_as_nested_dict(device)  # a tenth of the time that the flat dict takes
    except RuntimeError:  # an allocator of the user's own
        return 0
    return int(stats.get("allocated_bytes", {}).get("all", {}).get("current", 0))


def find_room(slots: Sequence[ParameterSlot], *, kept: bool) -> None:
    """Say of each how far below the peak the memory in use was, when the order of arrival was recorded.

    Gradients that are `kept` beside their bucket in any case take no more for waiting.
    """
    if kept:
        for slot in slots:
            slot.room = sys.maxsize
        return
    peaks: dict[torch.device, int] = {}
    for slot in slots:
        device = slot.bucket.spec.device
        peaks[device] = max(peaks.get(device, 0), slot.in_use)
    for slot in slots:
        slot.room = peaks[slot.bucket.spec.device] - slot.in_use
