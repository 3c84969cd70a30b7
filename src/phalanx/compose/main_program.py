"""Running a program as `python` runs it, after something else was done first in the same process."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any


class ProgramNotFoundError(Exception):
    """There is no such program. `exit_code` is the one that `python` ends with then."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a file as `python path arguments…` does: as `__main__`, with its folder in front of `sys.path`."""
    if not os.path.exists(path):
        raise ProgramNotFoundError(f"can't open file {os.path.abspath(path)!r}: no such file", 2)
    sys.argv[:] = [path, *arguments]
    if os.path.isdir(path) or not _is_source(path):  # a folder, an archive or compiled code with a __main__ in it
        _replace_first_path_entry(None)
        runpy.run_path(path, run_name="__main__")
        return
    file = os.path.abspath(path)
    _replace_first_path_entry(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    # No spec: by this `multiprocessing` and launchers see that the program is a file, to be run by its path.
    main = _main_module(__file__=file, __loader__=loader, __spec__=None, __package__=None, __cached__=None)
    with _Reported():
        with io.open_code(file) as source:
            code = compile(source.read(), file, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module or a package as `python -m name arguments…` does."""
    sys.argv[:] = ["-m", *arguments]
    spec, code = _found(name)
    sys.argv[0] = spec.origin or name
    main = _main_module(
        __file__=spec.origin,
        __loader__=spec.loader,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=spec.cached,
    )
    with _Reported():
        exec(code, main.__dict__)


def _found(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the parent package is there, and something that it imports is not
        spec = None
    except ValueError as error:
        raise ProgramNotFoundError(f"{name!r} cannot be run as a module: {error}", 1) from None
    if spec is None:
        raise ProgramNotFoundError(f"No module named {name}", 1)
    get_code = getattr(spec.loader, "get_code", None)
    code = None if get_code is None else get_code(name)
    if code is None:
        raise ProgramNotFoundError(f"{name} has no code to run", 1)
    return spec, code


def _is_source(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(4)
    return head != importlib.util.MAGIC_NUMBER and not head.startswith(b"PK\x03\x04")


def _replace_first_path_entry(folder: str | None) -> None:
    """`python -m` has put the current folder in front; for a script its own folder belongs there."""
    if sys.flags.safe_path:
        return  # python -P: nothing is put in front
    if folder is None:
        del sys.path[0]
    else:
        sys.path[0] = folder


def _main_module(**attributes: Any) -> ModuleType:
    """A fresh `__main__`. It stays until the process ends: what runs at exit, or pickles, looks for it."""
    main = ModuleType("__main__")
    main.__dict__.update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


class _Reported:
    """Shows an exception as the interpreter shows it, from the program's first line on, and ends with its exit code.

    By `sys.excepthook`: the program may have set it, and Phalanx tells the other ranks there.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
            return  # the interpreter ends by these itself, and for the latter by a signal
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None
