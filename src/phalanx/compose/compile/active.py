"""Where torch.compile asks whether a graph is to be split: for torch's DDP module that is active.

`DistributedDataParallel` is active while its forward runs. A replicated module has no forward of ours, and a hook on the
module would be traced along with it; so an object stands in for an active module at all times. What it is asked is
asked by the compiler, just before it makes the object that splits: which is when ours is put there.
"""

from __future__ import annotations

import sys

from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.api import engines


class StandIn:
    """What torch.compile finds active where no DDP module is. False, to it, where nothing is replicated."""

    @property
    def bucket_bytes_cap(self) -> int:
        """Never below the cap of a first bucket, which torch's splitter insists on; ours asks the reducers instead."""
        return 1 << 62

    def __bool__(self) -> bool:
        if not engines.any_at_work():
            return False
        _install()
        return True


_stand_in = StandIn()


class CompilerWatch:
    """Told of every reducer; see `engines.Watcher`."""

    def made(self) -> None:
        if TorchDDP._active_ddp_module is None:
            TorchDDP._active_ddp_module = _stand_in  # type: ignore[assignment]
        self.forward_begins()

    def forward_begins(self) -> None:
        if "torch._dynamo" in sys.modules:
            _install()


def _install() -> None:
    """The compiler is loaded: from now on what it looks up is ours. Cheap to call again."""
    if "phalanx.compose.compile.splitter" in sys.modules:
        return
    from phalanx.compose.compile import autograd, splitter

    splitter.install()
    autograd.install()
