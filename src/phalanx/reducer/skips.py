"""Leaving out buckets of which nothing was used: right only if every rank leaves out the same, so they compare, once.

A bucket that one rank reduces and another leaves out would pair with another collective: a wrong sum with no error, an
abort of the process (Gloo), or a hang.
"""

from __future__ import annotations

import weakref

from phalanx.comm.group import Group
from phalanx.errors import MismatchError, ReducerStateError
from phalanx.reducer.bucket import Bucket

AGREE_WITHIN_S = 1800.0  # a rank may be long in coming, as to any collective


class SkipAgreement:
    """Which buckets are left out, as agreed when each was first to leave. All ranks ask for each bucket, in order."""

    def __init__(self) -> None:
        self._left_out: weakref.WeakKeyDictionary[Bucket, bool] = weakref.WeakKeyDictionary()

    def leaves_out(self, bucket: Bucket, group: Group) -> bool:
        unused = not any(slot.seen for slot in bucket.slots)
        agreed = self._left_out.get(bucket)
        if agreed is None:
            self._compare(bucket, unused, group)
            self._left_out[bucket] = unused
        elif agreed != unused:
            self._refuse(bucket, unused, group)
        return unused

    def _compare(self, bucket: Bucket, unused: bool, group: Group) -> None:
        if group.size == 1:
            return
        said = group.exchange("unused buckets", b"unused" if unused else b"used", timeout_s=AGREE_WITHIN_S)
        if len(set(said)) > 1:
            without = [rank for rank, word in enumerate(said) if word == b"unused"]
            raise MismatchError(
                f"skip_all_reduce_unused_params asks that all ranks use the same parameters, but ranks {without} alone "
                "used none of this bucket. Leave it off, or use phalanx.replicate, which needs no flag",
                rank=group.rank,
                bucket=bucket.index,
                parameters=[slot.name for slot in bucket.slots],
            )

    def _refuse(self, bucket: Bucket, unused: bool, group: Group) -> None:
        """The others may go on as agreed and wait for this bucket, or for the next: nobody can be helped but by an end."""
        now, before = ("unused", "used") if unused else ("used", "unused")
        error = ReducerStateError(
            f"skip_all_reduce_unused_params asks that the same parameters are used in every step, but these are {now} "
            f"and were {before}. Leave it off, or use phalanx.replicate, which needs no flag",
            rank=group.rank,
            bucket=bucket.index,
            parameters=[slot.name for slot in bucket.slots],
        )
        group.abort(str(error))
        raise error
