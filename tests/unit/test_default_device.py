"""Every tensor that Phalanx makes says where: `torch.set_default_device("cuda")` is the user's, for their own tensors."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from torch.utils._device import _device_constructors

import phalanx

SOURCES = sorted(Path(inspect.getfile(phalanx)).parent.rglob("*.py"))
MAKERS = {maker.__name__ for maker in _device_constructors()}


def _made_anywhere(tree: ast.AST) -> list[int]:
    """Lines that call torch's constructors without a word on the device."""
    return [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in MAKERS
        and not any(given.arg in ("device", "out", None) for given in call.keywords)
    ]


def test_the_check_sees_what_it_is_for() -> None:
    source = "torch.empty(3)\ntorch.zeros(3, device=d)\nx.new_zeros(3)\ntorch.tensor([1])"
    assert _made_anywhere(ast.parse(source)) == [1, 4]


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    found = [f"{source}:{line}" for source in SOURCES for line in _made_anywhere(ast.parse(source.read_text()))]
    assert not found, "tensors whose device the user's default decides:\n" + "\n".join(found)
