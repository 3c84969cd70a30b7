"""Averaging at several levels: small groups of ranks often, larger ones less often, all of them now and then."""

from __future__ import annotations

import json
import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

import torch.distributed as dist
from torch.distributed.algorithms.model_averaging import hierarchical_model_averager as torch_hierarchical

from phalanx.comm.c10d import group_of
from phalanx.errors import MismatchError, PeerFailedError
from phalanx.optim.averagers import ModelAverager, averaging_every_step

logger = logging.getLogger(__name__)

AGREE_WITHIN_S = 600.0


class HierarchicalModelAverager(ModelAverager, torch_hierarchical.HierarchicalModelAverager):
    """Averages over groups of several sizes, each at its own period: torch's class, with its arguments.

    ``{4: 8, 16: 16}`` averages within each 8 ranks every 4 steps, and over all 16 every 16 steps. In a step that several
    periods divide, only the largest counts. The last size is that of `process_group`. Where a size does not divide it,
    the last sub-group is smaller.

    Collective: every rank of `process_group` makes one, with equal arguments, since it makes groups.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        levels = list((period_group_size_dict or {}).items())
        problem = _problem_with(levels, dist.get_world_size(self.process_group), warmup_steps)
        self._agree(levels, warmup_steps, problem)
        self._periods = [period for period, _ in levels]
        self.warmup_steps = warmup_steps
        if self._periods[-1] == 1:
            what = "the maximum period in arg ``period_group_size_dict``"
            warnings.warn(averaging_every_step(what), stacklevel=2)
        if not_nested := _not_nested([size for _, size in levels]):
            smaller, larger = not_nested
            warnings.warn(
                f"groups of {smaller} ranks do not fit into groups of {larger}: some are split between two of those, "
                "and what is averaged in one step is torn apart in another. Let each size divide the next.",
                stacklevel=2,
            )
        self._sizes = [size for _, size in levels]
        self.period_process_group_dict: OrderedDict[int, dist.ProcessGroup] = OrderedDict()
        logger.info("Model averaging hierarchy:")
        for period, size in levels:
            logger.info(
                "\tEach group of %s ranks averages parameters every %s steps, unless a larger does.", size, period
            )
            self.period_process_group_dict[period] = self._group_of(size)

    def _agree(self, levels: list[tuple[int, int]], warmup_steps: int, problem: str | None) -> None:
        """Raise on every rank where one has a bad configuration, or another one than its peers.

        Groups are made next, by all ranks together: a rank that raised by itself would leave the others waiting.
        """
        if isinstance(self.process_group, dist.ProcessGroup):
            group = group_of(self.process_group)
            shown = f"{dict(levels)}, warmup_steps={warmup_steps}"
            payload = json.dumps({"shown": shown, "problem": problem}).encode()
            said = group.exchange("averaging hierarchy", payload, timeout_s=AGREE_WITHIN_S)
            for rank, theirs in enumerate(json.loads(part) for part in said):
                if problem is None and theirs["problem"] is not None:
                    raise PeerFailedError(
                        f"rank {rank} could not make its averager: {theirs['problem']}",
                        failed_ranks=(rank,),
                        rank=group.rank,
                    )
                if problem is None and theirs["shown"] != shown:
                    raise MismatchError(
                        f"ranks are making different averagers: {shown} here, {theirs['shown']} on rank {rank}",
                        rank=group.rank,
                        group=group.name,
                    )
        if problem is not None:
            raise ValueError(problem)

    def _group_of(self, size: int) -> dist.ProcessGroup:
        """This rank's group among those of consecutive ranks that `process_group` is divided into."""
        whole = self.process_group
        if size == dist.get_world_size(whole):
            return whole
        members = dist.get_process_group_ranks(whole)
        parts = [members[start : start + size] for start in range(0, len(members), size)]
        # Groups of the whole job are numbered, so every rank makes all of them. Others are named by their ranks, and
        # made by those alone: ranks outside of `process_group` are not here.
        alone = whole is not dist.group.WORLD
        backend = str(dist.get_backend_config(whole)) if alone else None
        made = {
            tuple(part): dist.new_group(part, backend=backend, use_local_synchronization=alone)
            for part in parts
            if not alone or dist.get_rank() in part
        }
        mine = next(group for part, group in made.items() if dist.get_rank() in part)
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def _find_process_group(self) -> dist.ProcessGroup | None:
        """The group of the largest period that divides the step."""
        for period in reversed(self._periods):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None

    def due(self) -> dist.ProcessGroup | None:
        return self._find_process_group() if self.step >= self.warmup_steps else None

    def __repr__(self) -> str:
        levels = dict(zip(self._periods, self._sizes, strict=True))
        return f"{type(self).__name__}({levels}, warmup_steps={self.warmup_steps})"


def _problem_with(levels: list[tuple[int, int]], num_ranks: int, warmup_steps: int) -> str | None:
    """What is wrong with a configuration, beginning as torch says it where torch says it too."""
    if not levels:
        return "Arg ``period_group_size_dict`` must not be empty: it maps periods to group sizes, as in {4: 8, 16: 16}."
    shown = dict(levels)
    if wrong := [number for level in levels for number in level if not isinstance(number, int)]:
        return (
            f"arg ``period_group_size_dict`` maps periods to group sizes, whole numbers; got {wrong[0]!r} in {shown}."
        )
    periods, sizes = [period for period, _ in levels], [size for _, size in levels]
    if periods[0] <= 0:
        return f"The minimum period in arg ``period_group_size_dict`` must be a positive value; got {shown}."
    if sorted(set(periods)) != periods:
        return f"the periods in arg ``period_group_size_dict`` must grow from the first to the last; got {shown}."
    if sizes[-1] != num_ranks:
        return (
            f"The last value in arg ``period_group_size_dict`` {sizes[-1]} must be equal to the size of arg "
            f"``process_group`` {num_ranks}."
        )
    if sizes[0] < 1 or sorted(sizes) != sizes:
        return f"the group sizes in arg ``period_group_size_dict`` must be positive and must not shrink; got {shown}."
    if warmup_steps < 0:
        return f"Arg ``warmup_steps`` must be a non-negative number. Got {warmup_steps}."
    return None


def _not_nested(sizes: list[int]) -> tuple[int, int] | None:
    """Two neighbouring sizes of which the larger, short of the whole, is no multiple of the smaller."""
    for smaller, larger in pairwise(sizes):
        if larger % smaller and larger != sizes[-1]:
            return smaller, larger
    return None
