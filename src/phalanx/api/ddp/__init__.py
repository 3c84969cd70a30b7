"""`DistributedDataParallel`: torch's contract, argument for argument and word for word, on the reducer."""

from phalanx.api.ddp.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
