"""What the watch notices, and when: at once in most cases, within some steps for what went past torch's registration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.reducer.watch import LOOK_THROUGH_EVERY, ModuleWatch


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    made[1].bias.requires_grad_(False)
    return made


def add(module: nn.Sequential) -> None:
    module[0].more = nn.Parameter(torch.ones(1))


def append(module: nn.Sequential) -> None:
    module.append(nn.Linear(2, 2))


def replace(module: nn.Sequential) -> None:
    module[0].weight = nn.Parameter(torch.ones(2, 2))


def thaw(module: nn.Sequential) -> None:
    module[1].bias.requires_grad_(True)


def test_nothing_changed() -> None:
    module = net()
    watch = ModuleWatch(module)
    for _ in range(2 * LOOK_THROUGH_EVERY + 2):
        assert not watch.changed(all_arrived=True)
    net()  # registrations elsewhere
    assert not watch.changed(all_arrived=True) and not watch.changed()


@pytest.mark.parametrize("all_arrived", [True, False])
@pytest.mark.parametrize("change", [add, append, replace, thaw])
def test_noticed_at_once(change, all_arrived: bool) -> None:
    module = net()
    watch = ModuleWatch(module)
    assert not watch.changed(all_arrived=all_arrived)
    change(module)
    assert watch.changed(all_arrived=all_arrived)
    assert all_arrived or watch.changed()
    watch.remember(module)
    assert not watch.changed(all_arrived=all_arrived)


def test_frozen_ones_do_not_arrive() -> None:
    module = net()
    watch = ModuleWatch(module)
    module[0].weight.requires_grad_(False)
    assert watch.changed()


def test_what_is_put_past_the_registration_is_noticed_after_a_while() -> None:
    module = net()
    watch = ModuleWatch(module)
    module[0]._parameters["more"] = nn.Parameter(torch.ones(1))
    asked = [watch.changed(all_arrived=True) for _ in range(LOOK_THROUGH_EVERY + 1)]
    assert asked[-1] and not any(asked[:-1])
