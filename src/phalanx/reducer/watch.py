"""That the module still holds the parameters that were agreed on: replaced, added and (un)frozen ones are noticed.

A parameter that is not hooked trains alone on every rank, in silence. So once per step the module's own tables are
compared with what was seen at replication, in C loops over identities, which takes about 50 ns per parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


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

    def changed(self) -> bool:
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
