"""`register_hook`: let a communication hook average a module's gradients, on a replicated module or a DDP alike."""

from __future__ import annotations

import json
import weakref

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.api.replica import Replica, replica_of
from phalanx.comm.c10d import C10dGroup
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.hooks.call import HookCall, TorchHook, hook_name
from phalanx.hooks.registration import problem_with_hook

AGREE_WITHIN_S = 600.0

# The reducer holds hooks weakly (see WeakHookCall): here they live as long as their replica.
_calls: weakref.WeakKeyDictionary[Replica, HookCall] = weakref.WeakKeyDictionary()


def register_hook(module: nn.Module, hook: TorchHook, *, state: object = None) -> None:
    """Let ``hook(state, bucket)`` average the gradients of a replicated module (or a DDP) from the next step on.

    The hook is one written for torch's DDP: it gets a bucket with torch's methods, must do the averaging by itself, and
    returns a `torch.futures.Future` of a tensor like ``bucket.buffer()``. It chooses its group; torch's own hooks take
    that as their state, and use all ranks where it is None.

    Collective: every rank registers the same hook at the same point, between two steps. One per module, for good;
    `unreplicate` lets it go. A state that refers to the module keeps it until then.
    """
    if isinstance(module, TorchDDP):
        module.register_comm_hook(state, hook)
        return
    replica = replica_of(module)
    problem = problem_with_hook(hook)
    if problem is None and replica in _calls:
        problem = RuntimeError(
            f"this {type(module).__name__} has the communication hook {_calls[replica].name} already, and can have one: "
            "wrap one hook in the other, or call phalanx.unreplicate and replicate again"
        )
    _agree(replica, hook_name(hook), problem)
    if problem is not None:
        raise problem
    reducer, group = replica.reducer, replica.group
    assert isinstance(group, C10dGroup)
    # Weakly: the reducer leads to the replica, whose entry would keep it for good.
    weak = weakref.ref(reducer)
    call = _calls[replica] = HookCall(hook, state, group, lambda: len(there.buckets) if (there := weak()) else 0)
    reducer.set_bucket_hook(call.weakly())


def _agree(replica: Replica, name: str, problem: Exception | None) -> None:
    """A rank that reduces by a hook and one that does not would wait for each other, or add up the wrong things."""
    group = replica.group
    payload = json.dumps({"name": name, "problem": str(problem) if problem else None}).encode()
    said = [json.loads(part) for part in group.exchange("communication hook", payload, timeout_s=AGREE_WITHIN_S)]
    for rank, theirs in enumerate(said):
        if problem is None and theirs["problem"] is not None:
            raise PeerFailedError(
                f"rank {rank} could not register its communication hook: {theirs['problem']}",
                failed_ranks=(rank,),
                rank=group.rank,
            )
        if problem is None and theirs["name"] != name:
            raise MismatchError(
                f"ranks are registering different communication hooks: {name} here, {theirs['name']} on rank {rank}",
                rank=group.rank,
                group=group.name,
            )
