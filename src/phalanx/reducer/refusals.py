"""What a step is refused for, as errors: each says who, which parameters, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import PeerFailedError, ReducerStateError


def peer_failed(failed: Sequence[int], cause: str | None, *, rank: int, step: int) -> PeerFailedError:
    """Some rank's report says that its backward pass raised."""
    return PeerFailedError(
        f"rank {failed[0]} raised in its backward pass{f' ({cause})' if cause else ''}; "
        "this step's gradients are dropped on every rank",
        failed_ranks=failed,
        rank=rank,
        step=step,
    )


def cannot_be_captured(*, rank: int, step: int) -> ReducerStateError:
    """A CUDA graph is being captured in a step whose report has to be read at once."""
    return ReducerStateError(
        "a step with unused parameters, weights or px.join cannot be captured in a CUDA graph: what the other ranks "
        "used has to be read on the host",
        rank=rank,
        step=step,
    )


def order_lost_in_capture(*, rank: int, step: int) -> ReducerStateError:
    """A CUDA graph is being captured, and gradients come otherwise than in the steps before it."""
    return ReducerStateError(
        "in the step that is captured in a CUDA graph, gradients came in another order, in other streams or of other "
        "parameters than in the steps before. Run some steps exactly as they are to be captured first",
        rank=rank,
        step=step,
    )


def too_late(names: Sequence[str], *, rank: int, step: int) -> ReducerStateError:
    """Gradients came after their bucket had left, where a second round cannot be agreed on in time."""
    return ReducerStateError(
        "more gradients came than in the passes before, after their bucket had left. On this device the other ranks "
        "learn of it only when this step is over. The next pass expects them; or compute this part in no_sync and "
        "call phalanx.synchronize",
        rank=rank,
        step=step,
        parameters=names,
    )
