"""Check the Markdown files: links lead somewhere, snippets parse, and the names they use exist. `make docs`."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import phalanx

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
_FILE = re.compile(r"\b(?:examples|benchmarks|tests|docs|src)/[\w/.-]+\.\w+")
_TARGET = re.compile(r"\bmake ([a-z-]+)")


def problems(root: Path) -> list[str]:
    """One line for everything in the Markdown files under `root` that leads nowhere."""
    found = []
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    for page in sorted(root.rglob("*.md")):
        if any(part.startswith(".") for part in page.relative_to(root).parts):
            continue
        text = page.read_text()
        prose = _FENCE.sub("", text)
        where = page.relative_to(root)
        found += [f"{where}: link to {link}" for link in _LINK.findall(prose) if not _resolves(page, link)]
        found += [f"{where}: no file {name}" for name in sorted(set(_FILE.findall(text))) if not (root / name).exists()]
        code = " ".join(re.findall(r"`([^`\n]+)`", prose)) + "".join(
            s for lang, s in _FENCE.findall(text) if lang != "python"
        )
        found += [f"{where}: no target `make {t}`" for t in sorted(set(_TARGET.findall(code)) - targets)]
        for language, snippet in _FENCE.findall(text):
            if language in ("python", "py"):
                found += [f"{where}: {problem}" for problem in _snippet_problems(snippet)]
    return found


def _resolves(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True  # the web is not checked: the check must work without it
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target.read_text())


def _anchors(text: str) -> set[str]:
    """Heading anchors as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", _FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _snippet_problems(snippet: str) -> list[str]:
    try:
        tree = ast.parse(snippet)
    except SyntaxError as error:
        return [f"a snippet does not parse: {error}"]
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("px", "phalanx"):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module == "phalanx":
            used |= {alias.name for alias in node.names}
    return [
        f"a snippet uses phalanx.{name}, which does not exist" for name in sorted(used) if not hasattr(phalanx, name)
    ]


if __name__ == "__main__":
    wrong = problems(ROOT)
    print("\n".join(wrong) or "all links and snippets lead somewhere")
    sys.exit(bool(wrong))
