"""Each promise of `phalanx.testing`, and each way in which it must fail."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.testing import RanksFailed, meet, ranks, run_ranks
from phalanx.testing.server import why_not_forkable

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def failure_of(body: Any, world_size: int = 2, *args: Any, **options: Any) -> str:
    """The text of the error that running `body` must end with."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(body, world_size, *args, **options)
    return str(caught.value)


# --- what a body gets ---------------------------------------------------------------------------------------------


@ranks(2)
def test_body_runs_in_a_process_group() -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    assert dist.get_world_size() == 2


@ranks(3)
def test_ranks_meet_without_a_collective(tmp_path: Path) -> None:
    for turn in range(2):
        (tmp_path / f"{turn} {dist.get_rank()}").touch()
        meet(f"turn {turn}")
        assert all((tmp_path / f"{turn} {rank}").exists() for rank in range(3))


@ranks(3, backend=None)
def test_environment_is_a_launchers(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert os.environ["WORLD_SIZE"] == "3" and os.environ["RANK"] == os.environ["LOCAL_RANK"]
    assert os.environ["OMP_NUM_THREADS"] == "1" and torch.get_num_threads() == 1
    dist.init_process_group("gloo")  # MASTER_ADDR and MASTER_PORT are good for a group of the body's own
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, int(os.environ["RANK"]))
    assert gathered == [0, 1, 2]
    dist.destroy_process_group()
    # And again, once rank 0's old store is closed: who is quicker would join that one, at the same port, and wait.
    closed = tmp_path / "closed"
    if os.environ["RANK"] == "0":
        gc.collect()
        closed.touch()
    deadline = time.monotonic() + 20
    while not closed.exists():
        assert time.monotonic() < deadline, "rank 0 has not left its first group"
        time.sleep(0.005)
    dist.init_process_group("gloo")
    dist.barrier()


@pytest.mark.parametrize("value", [1, 2])
@ranks(2)
def test_arguments_reach_the_ranks(value: int, tmp_path: Path, monkeypatched: str) -> None:
    assert value in (1, 2)
    assert os.environ["PHALANX_TEST_VALUE"] == monkeypatched
    (tmp_path / str(dist.get_rank())).write_text(str(value))
    dist.barrier()
    assert {p.read_text() for p in tmp_path.iterdir()} == {str(value)}


@pytest.fixture
def monkeypatched(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PHALANX_TEST_VALUE", "from the test process")
    return "from the test process"


class TestMethods:
    offset = 10

    @ranks(2)
    def test_a_method_is_a_body_too(self) -> None:
        assert self.offset + dist.get_rank() in (10, 11)


@ranks(4)
def test_subgroups_and_threads() -> None:
    pair = dist.new_group([0, 1])
    results = []

    def in_thread() -> None:
        t = torch.ones(1)
        if dist.get_rank() < 2:
            dist.all_reduce(t, group=pair)
        results.append(t.item())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert results == [2.0 if dist.get_rank() < 2 else 1.0]


@ranks(2)
def test_backward_runs_in_a_fork() -> None:
    model = torch.nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None


def test_values_come_back_and_closures_travel() -> None:
    base = 40

    def recursive(n: int) -> int:
        return 0 if n == 0 else 1 + recursive(n - 1)

    def body(extra: int) -> int:
        return base + extra + recursive(dist.get_rank())

    assert run_ranks(body, 2, 2) == [42, 43]
    assert run_ranks(lambda: os.environ["RANK"], 2, backend=None) == ["0", "1"]


def test_decorated_function_is_callable_without_pytest() -> None:
    test_body_runs_in_a_process_group()


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"argument 0 of .*<lambda> \(lock\) cannot be sent to the ranks"):
        run_ranks(lambda lock: None, 2, threading.Lock())
    lock = threading.Lock()
    with pytest.raises(TypeError, match="closed-over 'lock'"):
        run_ranks(lambda: lock, 2)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        ranks(0)
    with pytest.raises(ValueError, match="expect_exit names ranks"):
        ranks(2, expect_exit={2: 0})
    with pytest.raises(TypeError, match="says why"):
        ranks(2, allow_leaks=True)  # type: ignore[arg-type]


# --- what a failure shows -----------------------------------------------------------------------------------------


def test_traceback_carries_its_rank_and_first_failure_comes_first() -> None:
    def body() -> None:
        print("printed by", dist.get_rank())
        meet("both have printed")
        if dist.get_rank() == 1:
            raise ValueError("broken on purpose")
        dist.barrier()

    text = failure_of(body)
    assert text.startswith("body: ranks 0, 1 of 2 failed")
    assert "ValueError: broken on purpose" in text
    assert text.index("[rank 1] Traceback") < text.index("[rank 0] Traceback")
    assert "[rank 0] printed by 0" in text and "[rank 1] printed by 1" in text


def test_asserts_say_what_they_compared() -> None:
    def body() -> None:
        found = dist.get_rank() + 5
        assert found == 5

    assert "assert 6 == 5" in failure_of(body)


def test_others_have_a_grace_and_are_then_killed_with_stacks() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise ValueError("broken on purpose")
        threading.Event().wait()

    started = time.monotonic()
    text = failure_of(body, timeout_s=60, grace_s=0.2)
    assert time.monotonic() - started < 10
    assert "[rank 0] was still running 0.2 s after rank 1 failed" in text and "in body" in text


def test_timeout_shows_every_ranks_stacks() -> None:
    def wait_for_nobody() -> None:
        threading.Event().wait()

    def body() -> None:
        if dist.get_rank() == 0:
            dist.recv(torch.ones(1), src=1)  # stuck in native code
        wait_for_nobody()

    text = failure_of(body, timeout_s=1)
    assert "timed out after 1 s with ranks 0, 1" in text
    rank0, rank1 = (text[text.index(f"[rank {r}] was still running") :] for r in (0, 1))
    assert "in recv" in rank0 and "in wait_for_nobody" in rank1


@linux_only
def test_a_stopped_rank_does_not_outlive_the_timeout() -> None:
    pids = failure_of(lambda: (print("pid", os.getpid()), os.kill(os.getpid(), signal.SIGSTOP)), 2, timeout_s=1)
    for line in pids.splitlines():
        if "] pid " in line:
            assert not Path(f"/proc/{line.split()[-1]}").exists()


def test_skip() -> None:
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run_ranks(lambda: pytest.skip("not today"), 2)

    def disagree() -> None:
        if dist.get_rank() == 0:
            pytest.skip("only here")

    assert "[rank 1] passed while another rank skipped" in failure_of(disagree)


def test_expected_exits() -> None:
    def body() -> str:
        meet("connected")
        if dist.get_rank() == 0:  # the rank that would host a launcher's store
            os.kill(os.getpid(), signal.SIGKILL)
        dist.distributed_c10d._get_default_store().set("alive", "yes")
        return "survived"

    assert run_ranks(body, 2, expect_exit={0: -9}) == [None, "survived"]
    assert "[rank 0] killed by SIGKILL before its body returned" in failure_of(body)
    assert "expected exit code 3" in failure_of(lambda: os._exit(4), 1, expect_exit={0: 3})
    assert "was expected to end with" in failure_of(lambda: None, 1, expect_exit={0: 3})
    run_ranks(lambda: sys.exit(3), 1, expect_exit={0: 3})


# --- what may not be left behind ----------------------------------------------------------------------------------


@linux_only
def test_leaked_process() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            print("pid", subprocess.Popen(["sleep", "1000"]).pid)

    text = failure_of(body)
    assert "the body passed and left something behind" in text
    assert "[rank 1] process" in text and "(sleep 1000) is still running" in text
    pid = next(line.split()[-1] for line in text.splitlines() if "] pid " in line)
    assert not Path(f"/proc/{pid}").exists()
    run_ranks(body, 2, allow_leaks="this body leaks on purpose")


@linux_only
def test_leaked_daemon_process() -> None:
    def body() -> None:
        subprocess.run(["sh", "-c", "setsid sleep 1000 &"], check=True)

    assert "(sleep 1000) outlived its rank" in failure_of(body, 1)


def test_leaked_thread() -> None:
    def body() -> None:
        threading.Thread(target=threading.Event().wait, name="straggler", daemon=dist.get_rank() == 0).start()

    text = failure_of(body)
    assert "[rank 0] thread 'straggler' (daemon) is still running" in text
    assert "[rank 1] thread 'straggler' (not daemon) is still running" in text


@linux_only
def test_leaked_socket_and_descriptor(tmp_path: Path) -> None:
    def body() -> None:
        kept = socket.socket(socket.AF_UNIX)
        kept.bind("\0phalanx-leak")
        listening = socket.create_server(("127.0.0.1", 0))
        file = open(tmp_path / "open", "w")
        sys.modules[__name__].__dict__["_kept"] = (kept, listening, file)

    text = failure_of(body, 1)
    assert "Unix socket @phalanx-leak" in text and "tcp port" in text and f"{tmp_path / 'open'}" in text


def test_leaked_socket_file(tmp_path: Path) -> None:
    def body() -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(tmp_path / "s"))

    assert f"socket file {tmp_path / 's'} is still there" in failure_of(body, 1)


@linux_only
def test_leaked_shared_memory() -> None:
    path = Path(f"/dev/shm/phalanx-leak-{os.getpid()}")
    try:
        assert f"shared memory {path} is still there" in failure_of(lambda: path.write_text("x") and None)
    finally:
        path.unlink(missing_ok=True)


@ranks(2)
def test_what_is_cleaned_up_is_no_leak() -> None:
    from multiprocessing import shared_memory

    memory = shared_memory.SharedMemory(create=True, size=64)
    memory.close()
    memory.unlink()
    loader = torch.utils.data.DataLoader(range(4), num_workers=1)
    assert len(list(loader)) == 4
    subprocess.run(["true"], check=True)
    left, right = socket.socketpair()
    left.close()
    right.close()


# --- the server ---------------------------------------------------------------------------------------------------


@linux_only
def test_a_server_with_threads_refuses_to_fork() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert "threads (" in why_not_forkable()
    finally:
        stop.set()
        thread.join()


def test_a_warm_test_is_cheap() -> None:
    run_ranks(lambda: None, 2)
    costs_s = []
    for _ in range(5):
        started = time.perf_counter()
        run_ranks(lambda: None, 2)
        costs_s.append(time.perf_counter() - started)
    assert min(costs_s) < 0.3, f"two ranks that do nothing cost {min(costs_s):.2f} s"


def test_an_interrupted_run_ends_its_ranks_and_the_next_one_works(tmp_path: Path) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def body(client_pid: int) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(client_pid, signal.SIGUSR1)
        threading.Event().wait()

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            run_ranks(body, 1, os.getpid())
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not _runs(int((tmp_path / "pid").read_text()))
    assert run_ranks(lambda: "again", 1) == ["again"]


@linux_only
def test_everything_ends_with_the_test_process(tmp_path: Path) -> None:
    """Kill a script in the middle of a run: its server, its ranks and what they started go too."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, subprocess, threading\n"
        "from phalanx.testing import run_ranks\n"
        "def body(path):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    with open(path, 'w') as fifo:\n"
        "        fifo.write(f'{os.getpid()} {os.getppid()} {child.pid}')\n"
        "    threading.Event().wait()\n"
        "if __name__ == '__main__':\n"
        "    import sys\n"
        "    run_ranks(body, 1, sys.argv[1], backend=None)\n"
    )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    process = subprocess.Popen([sys.executable, str(script), str(fifo)], env=env)
    pids = [int(pid) for pid in fifo.read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)  # nothing tells us: they are not our children
    assert [pid for pid in pids if _runs(pid)] == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
