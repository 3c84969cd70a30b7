"""That the module still holds the parameters that were agreed on: replaced, added and (un)frozen ones are noticed.

A parameter that is not hooked trains alone on every rank, in silence. So once per step the module is compared with what
was seen at replication. After a step in which every parameter's gradient has come, as expected, those parameters are
still there and still trained: what can have changed is that one was thawed, or that some module registered another, and
of registrations torch tells. After any other step, and every now and then, the module's own tables are looked through.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

LOOK_THROUGH_EVERY = 64  # steps: for what was put into a module's tables past `register_parameter`
_registrations = [0]  # of parameters and submodules, in all modules of this process


def note_registration(*_: object) -> None:
    """Called by torch whenever a module gets a parameter or a part."""
    _registrations[0] += 1


register_module_parameter_registration_hook(note_registration)
register_module_module_registration_hook(note_registration)


class ModuleWatch:
    """Remembers where each parameter of a module is registered; `changed` compares, `describe` says what differs."""

    def __init__(self, module: nn.Module, *, ignored: Callable[[str], bool] = lambda name: False) -> None:
        self._ignored = ignored
        self.remember(module)

    def remember(self, module: nn.Module) -> None:
        self._tables: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._held: list[Any] = []
        self._names: list[str] = []
        self._sized: list[dict[str, Any]] = []
        parameters: list[nn.Parameter] = []
        for prefix, submodule in module.named_modules():
            self._sized += [submodule._parameters, submodule._modules]
            for key, child in submodule._modules.items():  # a whole submodule may be replaced, tables and all
                self._tables.append(submodule._modules)
                self._keys.append(key)
                self._held.append(child)
            for key, parameter in submodule._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is not None and not self._ignored(name):
                    self._tables.append(submodule._parameters)
                    self._keys.append(key)
                    self._held.append(parameter)
                    self._names.append(name)
                    parameters.append(parameter)
        self._sizes = list(map(len, self._sized))
        self._parameters = parameters
        self._trained = [parameter.requires_grad for parameter in parameters]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        self._registrations = _registrations[0]
        self._until_look = LOOK_THROUGH_EVERY

    def changed(self, *, all_arrived: bool = False) -> bool:
        """`all_arrived`: every parameter that is trained has got its gradient since the last time that this was asked."""
        if all_arrived and self._registrations == _registrations[0] and self._until_look:
            self._until_look -= 1
            return bool(self._frozen) and any(parameter.requires_grad for parameter in self._frozen)
        self._until_look = LOOK_THROUGH_EVERY
        self._registrations = _registrations[0]
        return self._looks_different()

    def _looks_different(self) -> bool:
        return not (
            all(map(operator.is_, map(dict.get, self._tables, self._keys), self._held))
            and [parameter.requires_grad for parameter in self._parameters] == self._trained
            and list(map(len, self._sized)) == self._sizes
        )

    def added(self, module: nn.Module) -> list[str]:
        """Names that were not there."""
        known = set(self._names)
        return [
            name for name, _ in named_trained_parameters(module, self._ignored, all_of_them=True) if name not in known
        ]


def named_trained_parameters(
    module: nn.Module, ignored: Callable[[str], bool], *, all_of_them: bool = False
) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once (tied ones under their first name), in order of registration, those that need a gradient."""
    return [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if not ignored(name) and (all_of_them or parameter.requires_grad)
    ]


def expects_sparse(module: nn.Module, parameters: Sequence[tuple[str, torch.Tensor]]) -> list[bool]:
    """Which of the parameters belong to an embedding that makes sparse gradients."""
    sparse = {
        id(parameter)
        for submodule in module.modules()
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        for parameter in submodule.parameters(recurse=False)
    }
    return [id(parameter) in sparse for _, parameter in parameters]
