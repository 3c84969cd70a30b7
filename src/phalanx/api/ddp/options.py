"""The constructor's arguments, checked and turned into what the engine wants."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from phalanx.reducer.options import Placement, ReducerOptions
from phalanx.reducer.plan import MIB, BucketPolicy, default_policy_for
from phalanx.reducer.spread import part_of

DEFAULT_CAP_MB = 25


@dataclass(frozen=True)
class BucketCaps:
    """Bucket sizes as torch's arguments say them: one cap in MiB, or a list with a cap per bucket."""

    bucket_bytes: int
    first_bucket_bytes: int
    per_bucket_bytes: tuple[int, ...]

    @classmethod
    def of(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> BucketCaps:
        if cap_mb_list:
            caps = tuple(int(cap * MIB) for cap in cap_mb_list)
            return cls(max(caps), max(caps), caps)
        if cap_mb is None:
            return cls(DEFAULT_CAP_MB * MIB, int(dist._DEFAULT_FIRST_BUCKET_BYTES), ())
        return cls(int(cap_mb * MIB), int(cap_mb * MIB), ())

    @property
    def is_default(self) -> bool:
        """Whether the user leaves sizes to us."""
        return self.first_bucket_bytes < self.bucket_bytes

    def policy(self, parameters: Sequence[torch.Tensor]) -> BucketPolicy:
        if self.is_default:
            return default_policy_for([part_of(p) for p in parameters], small_bytes=self.first_bucket_bytes)
        # A cap of zero means a bucket per gradient to torch.
        cap = max(self.bucket_bytes, 1)
        return BucketPolicy(cap, cap, tuple(max(one, 1) for one in self.per_bucket_bytes))

    def first_policy(self, parameters: Sequence[torch.Tensor], *, static: bool, find_unused: bool) -> BucketPolicy:
        """Until the order of arrival is known: one bucket, unless unused parameters are looked for, as in torch.

        A bucket launched in an unknown order could pair with another collective of the user's backward.
        """
        if self.per_bucket_bytes or (find_unused and not static):
            return self.policy(parameters)
        return BucketPolicy(sys.maxsize, sys.maxsize)


def engine_options(
    caps: BucketCaps,
    parameters: Sequence[torch.Tensor],
    *,
    as_view: bool,
    find_unused: bool,
    static: bool,
    skip_unused: bool,
    wire_dtype: torch.dtype | None = None,
) -> ReducerOptions:
    return ReducerOptions(
        policy=caps.policy(parameters),
        first_policy=caps.first_policy(parameters, static=static, find_unused=find_unused),
        placement=Placement.VIEW if as_view else Placement.COPY,
        replan=static or not find_unused,
        settle_unused=find_unused and not static,
        static=static,
        skip_unused_buckets=skip_unused and find_unused,
        wire_dtype=wire_dtype,
    )


@dataclass(frozen=True)
class Devices:
    """Where a module is, and where its inputs go."""

    type: str
    several: bool
    ids: list[int] | None
    output: int | None

    @classmethod
    def of(
        cls,
        parameters: Sequence[nn.Parameter],
        device_ids: Sequence[int | torch.device] | None,
        output_device: int | torch.device | None,
    ) -> Devices:
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError("device_ids can only be None or contain a single element.")
        devices = {parameter.device for parameter in parameters}
        types = {device.type for device in devices}
        if len(types) != 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but input module "
                f"parameters locate in {types}."
            )
        (kind,) = types
        several = len(devices) > 1
        if not device_ids or kind == "cpu" or several:
            if device_ids or output_device:
                raise ValueError(
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    "single-device/multiple-device GPU modules or CPU modules, but got "
                    f"device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
                )
            return cls(kind, several, None, None)
        index = _index(device_ids[0])
        return cls(kind, several, [index], index if output_device is None else _index(output_device))


def _index(device: int | torch.device | str) -> int:
    if isinstance(device, int):
        return device
    if torch.device(device).type == "cpu":
        raise ValueError(
            f"device_ids and output_device must name an accelerator, as the module is on one; got {device}"
        )
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index
