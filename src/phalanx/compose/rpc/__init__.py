"""RPC and distributed autograd: DDP modules whose gradients live in a context, not in ``.grad``.

Read in this order: `contexts` (which context a thread is in), `gradients` (one module: its hooks, its passes),
`context_pass` (one backward pass: what arrives, what is sent, what is written back), `task_end` (when a pass is over),
`rounds` (the group and the buckets), `floor` (whose turn it is to send), `agreement` (whether all ranks are at the same
pass), `unused` (parameters that a rank did not use) and `peers` (what the others are at, asked by RPC).
"""

from __future__ import annotations

from phalanx.api.ddp import contexts as seam


def register() -> None:
    """Let DDP modules ask for the context they are in. Loads nothing that torch has not."""
    import torch.distributed.rpc

    if torch.distributed.rpc.is_available():
        from phalanx.compose.rpc.contexts import RpcContexts

        seam.register(RpcContexts())
