"""The constructor's arguments, turned into bucket caps and devices: pure, and checked where they are made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.api.ddp.construction import trained_parameters
from phalanx.api.ddp.options import BucketCaps, Devices

MIB = 1024 * 1024


def parameter(device: str = "cpu") -> nn.Parameter:
    return nn.Parameter(torch.empty(2, device=device))


def test_the_default_caps_are_torchs() -> None:
    caps = BucketCaps.of(None, None)
    assert (caps.bucket_bytes, caps.first_bucket_bytes) == (25 * MIB, dist._DEFAULT_FIRST_BUCKET_BYTES)


def test_one_cap_is_for_all_buckets() -> None:
    assert BucketCaps.of(3, None) == BucketCaps(3 * MIB, 3 * MIB, ())


def test_a_list_gives_each_bucket_its_own() -> None:
    policy = BucketCaps.of(None, [1, 2, 4]).policy([])
    assert [policy.cap(number) for number in range(5)] == [1 * MIB, 2 * MIB, 4 * MIB, 4 * MIB, 4 * MIB]


def test_a_cap_of_zero_is_a_bucket_per_gradient() -> None:
    assert BucketCaps.of(0, None).policy([]).cap(0) == 1


def test_before_the_order_is_known_all_travel_together_unless_unused_ones_are_looked_for() -> None:
    caps = BucketCaps.of(1, None)
    assert caps.first_policy([], static=False, find_unused=False).cap(0) > 2**40
    assert caps.first_policy([], static=True, find_unused=True).cap(0) > 2**40
    assert caps.first_policy([], static=False, find_unused=True).cap(0) == 1 * MIB


def test_where_no_cap_is_given_the_parameters_decide() -> None:
    large = [nn.Parameter(torch.empty(40 * MIB, device="meta")) for _ in range(3)]
    assert BucketCaps.of(None, None).policy([parameter()]).bucket_bytes == 25 * MIB
    assert BucketCaps.of(None, None).policy(large).bucket_bytes == 160 * MIB  # any device but the CPU
    assert BucketCaps.of(30, None).policy(large).bucket_bytes == 30 * MIB


def test_a_cpu_module_takes_no_devices() -> None:
    devices = Devices.of([parameter()], None, None)
    assert (devices.type, devices.ids, devices.output, devices.several) == ("cpu", None, None, False)
    with pytest.raises(ValueError, match="only work with"):
        Devices.of([parameter()], [0], None)


def test_a_device_can_be_named_in_any_way() -> None:
    given = [parameter("meta")]  # stands for an accelerator
    for way in (1, "cuda:1", torch.device("cuda", 1)):
        assert Devices.of(given, [way], None).ids == [1]
        assert Devices.of(given, [way], None).output == 1
        assert Devices.of(given, [0], way).output == 1


def test_two_kinds_of_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="must be on the same type of devices"):
        Devices.of([parameter(), parameter("meta")], None, None)


def test_parameters_are_listed_once_in_torchs_order_under_their_first_name() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.own = nn.Parameter(torch.zeros(1))
            self.tied = nn.Linear(2, 2, bias=False)
            self.tied.weight = self.layer.weight
            self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)

    assert [name for name, _ in trained_parameters(Root(), ())] == ["own", "layer.weight", "layer.bias"]
    for ignored in ("own", ".own"):  # torch's own code joins with a dot also where there is no prefix
        assert "own" not in dict(trained_parameters(Root(), {ignored}))
    assert "layer.weight" not in dict(trained_parameters(Root(), {"layer.weight", "tied.weight"}))
