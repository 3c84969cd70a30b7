"""Which samples a rank sees, where it stands among them, and putting what was computed on them together again."""

from phalanx.data.gather import gather_exact
from phalanx.data.sampler import DistributedSampler

__all__ = ["DistributedSampler", "gather_exact"]
