"""Carrying a test body from the test process into a rank.

The ranks are forked from a server that has never seen the test module, so a function is not inherited: it is sent. Its
code travels as such, which keeps two things that a plain import would lose: closures and local functions work, and
pytest's rewritten asserts say what was compared. Its globals are those of its module, which each rank imports from
its file (in the rank, not in the server: a test module may run tensor operations at import).
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

_EMPTY = "phalanx.testing: an empty closure cell"


def encode(body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call of `body`. Raises `TypeError` naming the argument or closed-over value that cannot travel."""
    try:
        return _dumps((body, args, kwargs), by_value=body)
    except Exception as error:
        raise TypeError(_what_cannot_travel(body, args, kwargs, error)) from error


def decode(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call again, in a rank. Imports the modules that it needs."""
    body, args, kwargs = pickle.loads(payload)
    return body, args, kwargs


class _BodyPickler(pickle.Pickler):
    """Sends the body and local functions by value (their code), what a test module defines by that module's file."""

    def __init__(self, file: io.BytesIO, by_value: object) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._by_value = by_value

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and not _is_installed(obj.__module__):
            module, path = _home_of(obj)
            if obj is not self._by_value and _is_found_by_name(obj):
                return _find_in_module, (module, path, obj.__qualname__)
            state = (obj.__defaults__, obj.__kwdefaults__, tuple(_cell_contents(c) for c in obj.__closure__ or ()))
            skeleton = (module, path, marshal.dumps(obj.__code__), obj.__qualname__, len(state[2]))
            return _make_function, skeleton, state, None, None, _fill_function
        if isinstance(obj, type) and not _is_installed(obj.__module__):
            if "<locals>" in obj.__qualname__:
                raise pickle.PicklingError(f"{obj.__qualname__} is a local class; define it at module level")
            module, path = _home_of(obj)
            return _find_in_module, (module, path, obj.__qualname__)
        return NotImplemented


def _is_installed(module: str | None) -> bool:
    """Whether a rank can simply import the module by its name: what the harness and torch themselves are made of."""
    return module is not None and module.split(".")[0] in {"builtins", "torch", "phalanx", *sys.stdlib_module_names}


def _home_of(obj: Any) -> tuple[str, str]:
    module = obj.__module__
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        raise pickle.PicklingError(f"{obj.__qualname__} lives in {module!r}, which has no file for a rank to import")
    return module, path


def _is_found_by_name(function: types.FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned when the body was sent
        return _EMPTY


def _make_function(module: str, path: str, code: bytes, qualname: str, num_cells: int) -> types.FunctionType:
    # Cells are made empty and filled afterwards: a local function may close over itself.
    scope = load_module(module, path).__dict__
    if "_pytest" in sys.modules:  # what pytest's rewritten asserts call
        scope.setdefault("@py_builtins", builtins)
        scope.setdefault("@pytest_ar", importlib.import_module("_pytest.assertion.rewrite"))
    cells = tuple(types.CellType() for _ in range(num_cells))
    function = types.FunctionType(marshal.loads(code), scope, None, None, cells)
    function.__qualname__ = qualname
    return function


def _fill_function(function: types.FunctionType, state: tuple[Any, Any, tuple[Any, ...]]) -> None:
    function.__defaults__, function.__kwdefaults__, contents = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if not (isinstance(content, str) and content == _EMPTY):
            cell.cell_contents = content


def _find_in_module(module: str, path: str, qualname: str) -> Any:
    found: Any = load_module(module, path)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def load_module(name: str, path: str) -> types.ModuleType:
    """The module of that name, from that file.

    By name where the name leads to the file, so that a package's relative imports work; otherwise straight from the
    file (pytest's importlib mode gives test modules names that nobody else can import).
    """
    alias = "__mp_main__" if name == "__main__" else name  # so that a script's `if __name__ == "__main__"` stays shut
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    try:
        spec = importlib.util.find_spec(alias)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is not None and spec.origin == path:
        return importlib.import_module(alias)
    spec = importlib.util.spec_from_file_location(alias, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[alias] = module
    spec.loader.exec_module(module)
    return module


def _dumps(obj: object, *, by_value: object = None) -> bytes:
    buffer = io.BytesIO()
    _BodyPickler(buffer, by_value).dump(obj)
    return buffer.getvalue()


def _what_cannot_travel(
    body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> str:
    named = {f"argument {i}": value for i, value in enumerate(args)}
    named |= {f"argument {name!r}": value for name, value in kwargs.items()}
    for cell_name, cell in zip(
        getattr(getattr(body, "__code__", None), "co_freevars", ()),
        getattr(body, "__closure__", None) or (),
        strict=False,
    ):
        named[f"closed-over {cell_name!r}"] = _cell_contents(cell)
    for what, value in named.items():
        try:
            _dumps(value)
        except Exception as cause:
            return (
                f"{what} of {getattr(body, '__qualname__', body)} ({type(value).__name__}) cannot be sent to the "
                f"ranks: {cause}. Ranks are other processes: pass what pickles, make the rest inside the body."
            )
    return f"{getattr(body, '__qualname__', body)} cannot be sent to the ranks: {error}"
