"""Batch normalisation over the samples of all ranks."""

from phalanx.api.sync_batch_norm.layer import SyncBatchNorm, synchronize_batch_norm
from phalanx.api.sync_batch_norm.shadow import Shadowing, problem_with, synchronized_layers

__all__ = ["Shadowing", "SyncBatchNorm", "problem_with", "synchronize_batch_norm", "synchronized_layers"]
