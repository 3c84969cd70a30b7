"""The compiler takes seconds to load: neither `import phalanx` nor a plain step does so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
import phalanx as px
assert "torch._dynamo" not in sys.modules, "by the import"
px.init()
ddp = px.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
model = px.replicate(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules, "by a step"
torch.compile(model, backend="eager")(torch.ones(1, 2)).sum().backward()
assert "torch._dynamo" in sys.modules
px.shutdown()
"""


def test_the_compiler_is_loaded_by_its_user() -> None:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr
