"""`python -m phalanx.swap_ddp`: a program runs as `python program` would run it, on our class."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.testing import run_ranks

SRC = Path(__file__).parents[2] / "src"
SHOW = """
import json, os, sys
import torch.nn.parallel
from beside import THING

def show():
    import __main__
    print(json.dumps({
        "name": __name__,
        "file": __file__,
        "argv": sys.argv,
        "path": sys.path[0],
        "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "is_main": sys.modules["__main__"].__dict__ is globals(),
        "annotations": show.__annotations__,
        "ddp": torch.nn.parallel.DistributedDataParallel.__module__,
    }))

show()
"""


def _ended(arguments: list[str], cwd: str) -> tuple[int, str, str]:
    """Exit code and output of `python -m phalanx.swap_ddp arguments…` (in a rank, which is a process of its own)."""
    os.chdir(cwd)
    sys.path.insert(0, cwd)  # as `python -m` does
    out, err = io.StringIO(), io.StringIO()
    from phalanx.swap_ddp import main

    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


def ended(arguments: list[str], cwd: Path) -> tuple[int, str, str]:
    (result,) = run_ranks(_ended, 1, arguments, str(cwd), backend=None)
    assert result is not None
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job" / "package").mkdir(parents=True)
    job = tmp_path / "job"
    (job / "beside.py").write_text("THING = 1\n")
    (job / "train.py").write_text(SHOW)
    (job / "package" / "__init__.py").write_text("")
    (job / "package" / "inner.py").write_text(SHOW)
    (job / "package" / "__main__.py").write_text(SHOW)
    return job


def test_a_script(folder: Path) -> None:
    code, out, err = ended(["job/train.py", "-m", "--lr", "0.1"], folder.parent)
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "name": "__main__",
        "file": str(folder / "train.py"),
        "argv": ["job/train.py", "-m", "--lr", "0.1"],
        "path": str(folder),
        "package": None,
        "spec": None,
        "is_main": True,
        "annotations": {},
        "ddp": "phalanx.api.ddp.module",
    }


@pytest.mark.parametrize(
    ("name", "file", "spec"),
    [
        ("train", "train.py", "train"),
        ("package.inner", "package/inner.py", "package.inner"),
        ("package", "package/__main__.py", "package.__main__"),
    ],
)
def test_a_module(folder: Path, name: str, file: str, spec: str) -> None:
    code, out, err = ended(["-m", name, "--help"], folder)
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown["argv"] == [str(folder / file), "--help"]
    assert (shown["name"], shown["spec"], shown["path"]) == ("__main__", spec, str(folder))
    assert shown["package"] == spec.rpartition(".")[0] and shown["is_main"]


def test_a_symbolic_link_has_the_folder_that_it_points_to(folder: Path) -> None:
    (folder.parent / "link.py").symlink_to(folder / "train.py")
    code, out, _ = ended(["link.py"], folder.parent)
    assert code == 0 and json.loads(out)["path"] == str(folder)


def test_a_folder_with_a_main(folder: Path) -> None:
    (folder / "__main__.py").write_text(SHOW)
    code, out, err = ended(["job"], folder.parent)
    assert (code, err) == (0, "") and json.loads(out)["name"] == "__main__"


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(7)", 7), ("sys.exit()", 0), ("raise SystemExit(3)", 3)])
def test_exit_codes(folder: Path, ending: str, code: int) -> None:
    (folder / "end.py").write_text(f"import sys\n{ending}\n")
    assert ended(["end.py"], folder) == (code, "", "")


def test_a_traceback_begins_in_the_program(folder: Path) -> None:
    (folder / "broken.py").write_text("def f():\n    raise KeyError('here')\n\nf()\n")
    code, _, err = ended(["broken.py"], folder)
    assert code == 1
    lines = err.splitlines()
    assert lines[:3] == [
        "Traceback (most recent call last):",
        f'  File "{folder / "broken.py"}", line 4, in <module>',
        "    f()",
    ]
    assert lines[-1] == "KeyError: 'here'" and "swap_ddp" not in err and "runpy" not in err


def test_a_program_that_does_not_parse(folder: Path) -> None:
    (folder / "typo.py").write_text("x = (\n")
    code, _, err = ended(["typo.py"], folder)
    assert code == 1 and err.startswith(f'  File "{folder / "typo.py"}", line 1')
    assert err.rstrip().splitlines()[-1].startswith("SyntaxError")


def test_the_programs_own_excepthook_is_asked(folder: Path) -> None:
    (folder / "hooked.py").write_text("import sys\nsys.excepthook = lambda *_: print('mine')\n1 / 0\n")
    assert ended(["hooked.py"], folder) == (1, "mine\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere.py"], 2, "can't open file '{folder}/nowhere.py': no such file"),
        (["-m", "nowhere"], 1, "No module named nowhere"),
        (["-m", "package.nowhere"], 1, "No module named package.nowhere"),
        (["-m", "nowhere.at.all"], 1, "No module named nowhere.at.all"),
        (["-m"], 2, "which module?"),
        ([], 2, "which program?"),
        (["--lr", "3", "train.py"], 2, "--lr is not an option of swap_ddp; options of the program come after its name"),
    ],
)
def test_what_cannot_be_run(folder: Path, arguments: list[str], code: int, message: str) -> None:
    got, out, err = ended(arguments, folder)
    assert (got, out) == (code, "")
    assert "swap_ddp: " + message.format(folder=folder) in err
    assert "Traceback" not in err


def test_help() -> None:
    code, out, err = ended(["--help"], Path.cwd())
    assert (code, err) == (0, "") and out.startswith("usage: python -m phalanx.swap_ddp")


TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.multiprocessing as mp

def in_child(folder):
    from torch.nn.parallel import DistributedDataParallel
    open(f"{folder}/child{os.environ['RANK']}", "w").write(DistributedDataParallel.__module__)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DDP(torch.nn.Linear(3, 1))
    model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
    torch.save((type(model).__module__, model.module.weight.grad), f"{sys.argv[1]}/rank{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        child = mp.get_context("spawn").Process(target=in_child, args=(sys.argv[1],))
        child.start()
        child.join()
    dist.destroy_process_group()
"""


@pytest.mark.timeout(200)
def test_under_torchrun_and_in_processes_that_the_program_starts(tmp_path: Path) -> None:
    """As it is typed, once: two ranks by torchrun, one of which starts a process by `spawn`."""
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["RES_OPTIONS"] = "timeout:1 attempts:1"  # see phalanx.testing.rank
    env["PYTHONPATH"] = os.pathsep.join([str(SRC), *filter(None, [env.get("PYTHONPATH")])])
    command = [*torchrun, "--nproc-per-node", "2", "-m", "phalanx.swap_ddp", "train.py", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, env=env, timeout=160)
    for rank in range(2):
        module, gradient = torch.load(tmp_path / f"rank{rank}.pt")
        assert module == "phalanx.api.ddp.module"
        assert torch.equal(gradient, torch.ones(1, 3))  # the mean of 2 · 0 and 2 · 1
    assert (tmp_path / "child0").read_text() == "phalanx.api.ddp.module"


def test_a_sitecustomize_of_the_users_still_runs(tmp_path: Path) -> None:
    from phalanx.compose.child_processes import SITE, VARIABLE

    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.users_own = True\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([SITE, str(tmp_path)]), VARIABLE: ""}
    program = "import sys; print(sys.users_own, 'torch' in sys.modules, sys.modules['sitecustomize'].__file__)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True)
    assert answer.stdout.split() == ["True", "False", str(tmp_path / "sitecustomize.py")]
