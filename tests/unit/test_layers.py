"""Imports point down the layers only, and the core needs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "phalanx"

# From the top down. A module's layer is the first part of its path under src/phalanx; layers in one row are strangers.
LAYERS = (
    ("cli",),
    ("elastic",),
    ("observe",),
    ("compose",),
    ("api",),
    ("data", "optim"),
    ("hooks",),
    ("reducer",),
    ("comm",),
    ("events", "errors"),
)
DEPTH = {layer: depth for depth, row in enumerate(LAYERS) for layer in row}
ABOVE_ALL = {"__init__", "__main__", "swap_ddp", "testing"}  # may import anything; nothing imports them


def violations(root: Path) -> list[str]:
    """Every import under `root` that does not point down, as `file:line: why`."""
    found = []
    for file in sorted(root.rglob("*.py")):
        layer = _layer(file.relative_to(root))
        if layer not in DEPTH and layer not in ABOVE_ALL:
            found.append(f"{file}:1: {layer!r} is no layer: give it a place in LAYERS")
            continue
        for line, target in _imported_layers(file, root):
            if layer in ABOVE_ALL and (target != "testing" or layer == "testing"):
                continue
            if target in ABOVE_ALL:
                found.append(f"{file}:{line}: {layer} imports {target}, which nothing may import")
            elif target != layer and DEPTH.get(target, -1) <= DEPTH[layer]:
                found.append(f"{file}:{line}: {layer} imports {target}, which is not below it")
    return found


def _layer(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _imported_layers(file: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Layers that a file imports, anywhere in it: at the top, in functions, under TYPE_CHECKING, by import_module."""
    package = [root.name, *file.relative_to(root).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from phalanx import comm` imports a layer, `from phalanx import replicate` the top of the package.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == root.name else [module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            names = [str(node.args[0].value)] if called in ("import_module", "__import__") else []
        for name in names:
            top, _, rest = name.partition(".")
            if top == root.name:
                layer = rest.split(".")[0]
                is_module = (root / layer).is_dir() or (root / f"{layer}.py").is_file()
                yield node.lineno, layer if layer and is_module else "__init__"


def test_imports_point_down() -> None:
    assert violations(SRC) == []


@pytest.mark.parametrize(
    "source",
    [
        "from phalanx.api.ddp import DDP",
        "import phalanx.api",
        "import phalanx",
        "from phalanx import api",
        "from phalanx import replicate",
        "from ..api import ddp",
        "from .. import api",
        "def f():\n    from phalanx.api import ddp",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import phalanx.api.ddp",
        "import importlib\nimportlib.import_module('phalanx.api.ddp')",
        "import phalanx.testing",
        "import phalanx.swap_ddp",
    ],
)
def test_an_import_that_points_up_is_found(source: str, tmp_path: Path) -> None:
    root = _tree(tmp_path, {"comm/group.py": source})
    assert [v.split(": ")[0].rpartition("/")[2][:8] for v in violations(root)] == ["group.py"]


def test_siblings_and_unknown_layers_are_found(tmp_path: Path) -> None:
    root = _tree(tmp_path, {"data/plan.py": "import phalanx.optim", "misc/x.py": ""})
    assert len(violations(root)) == 2


def test_imports_that_point_down_are_fine(tmp_path: Path) -> None:
    root = _tree(
        tmp_path,
        {
            "api/more.py": "import torch\nimport phalanx.comm.group\nfrom phalanx import errors\nfrom . import ddp",
            "comm/group.py": "from ..errors import E\nfrom .shm import x",
            "testing/__init__.py": "import phalanx.api",
            "__init__.py": "from phalanx.api.ddp import DDP",
        },
    )
    assert violations(root) == []


def _tree(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "phalanx"
    layout = {"api/ddp.py": "", "comm/group.py": "", "errors.py": "", "optim/x.py": "", "swap_ddp.py": ""}
    for name, source in {**layout, "testing/__init__.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_the_core_needs_torch_alone() -> None:
    """Runs in a fresh interpreter: what `import phalanx` adds to what `import torch` has loaded."""
    program = (
        "import sys, torch, torch.distributed\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import phalanx\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(*sorted(after - before - set(sys.stdlib_module_names) - {'phalanx'} - set(sys.argv[1:])))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, *_torch_needs()], capture_output=True, text=True, check=True, cwd=SRC.parent
    )
    assert answer.stdout.split() == []


def _torch_needs() -> set[str]:
    """Packages that come with torch: parts of torch that Phalanx uses may load more of them than `import torch`."""
    import re
    from importlib import metadata

    def needs(distribution: str, seen: set[str]) -> set[str]:
        for line in metadata.requires(distribution) or ():
            name = re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("-", "_")
            if "extra ==" not in line and name not in seen:
                seen.add(name)
                try:
                    needs(name, seen)
                except metadata.PackageNotFoundError:
                    continue  # for another platform
        return seen

    return needs("torch", {"torchgen", "functorch"})
