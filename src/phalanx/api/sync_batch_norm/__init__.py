"""Batch normalisation over the samples of all ranks."""

from phalanx.api.sync_batch_norm.layer import SyncBatchNorm, synchronize_batch_norm
from phalanx.api.sync_batch_norm.shadow import Shadow

__all__ = ["Shadow", "SyncBatchNorm", "synchronize_batch_norm"]
