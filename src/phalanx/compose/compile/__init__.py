"""torch.compile: what the compiler has to be told. Loads nothing of it: `import torch._dynamo` takes seconds.

Gradients that one compiled backward computes all arrive at its end, when nothing is left to hide their reduction behind.
So a captured graph is compiled in pieces that end where buckets do (`splitter`). That is no graph break: it happens after
capture, at a place where the compiler asks for torch's DDP module that is active (`active`). Under compiled autograd the
whole backward is one graph, which calls the reducer's hooks (`autograd`). What the compiler must not look into is marked
(`frames`).
"""

from __future__ import annotations

from phalanx.api import engines
from phalanx.compose.compile import active, frames


def register() -> None:
    """Called once, when the package is imported."""
    frames.mark()
    engines.register(active.CompilerWatch())
