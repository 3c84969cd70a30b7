"""The life of one rank: from the fork to its report.

`main` runs in a process just forked from the server and never returns. The order matters: the parent's death is watched
before anything can block, the output is redirected before anything can print, and the snapshot for leaks is taken after
the test module is imported and before the process group is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
import unittest
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # torch does not list them

from phalanx.comm.ending import destroy_all_groups
from phalanx.testing import body as bodies
from phalanx.testing import wire
from phalanx.testing.leaks import Snapshot, SocketFiles, left_behind

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write the Python stacks of all its threads and die, even when it is stuck in native code."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Seat:
    """What the server gives a rank at birth: its place, its line to the server, its files, and where to meet."""

    rank: int
    line: socket.socket
    output: IO[bytes]
    stacks: IO[bytes]
    store_port: int
    master_port: int
    run_id: str
    server_pid: int


def main(request: wire.RunRequest, seat: Seat) -> NoReturn:
    """Be the rank. Exits with 0 when a report was sent, with the body's own code when it called `sys.exit`."""
    code = 70
    try:
        _settle_in(request, seat)
        report = _run(request, seat)
        _flush()
        wire.send(seat.line, report)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except OSError:
        pass  # the server is gone, and with it whoever would read the report
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: that would unwind into the server's frames, and wait for the threads that the body left.
        _flush()
        os._exit(code)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent ends, however it ends (Linux; elsewhere the closed line has to do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before we asked
            os._exit(1)


def _settle_in(request: wire.RunRequest, seat: Seat) -> None:
    os.setsid()  # the server ends a rank together with everything that it started
    die_with_parent(seat.server_pid)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    os.dup2(seat.output.fileno(), 1)
    os.dup2(seat.output.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=True)  # so that a killed rank's words are kept
    # chain: after the dump the default action ends the process, which is how the server knows that it is complete.
    faulthandler.register(STACKS_SIGNAL, file=seat.stacks, all_threads=True, chain=True)
    faulthandler.enable(file=sys.stderr)

    os.environ.clear()
    os.environ.update(request.env)
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(request.world_size),
        LOCAL_WORLD_SIZE=str(request.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.master_port),
        OMP_NUM_THREADS="1",
    )
    # Gloo otherwise looks up the host's name, which fails or takes seconds on machines that cannot resolve their own.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # A store that the body hosts asks the name server about each peer (see keeper): do not wait 5 s for no answer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    sys.path[:] = request.sys_path
    os.chdir(request.cwd)
    torch.set_num_threads(1)


def _run(request: wire.RunRequest, seat: Seat) -> wire.RankReport:
    socket_files = SocketFiles() if request.check_leaks else None
    try:
        body, args, kwargs = bodies.decode(request.payload)
        before = Snapshot.take()
        if request.backend is not None:
            _init_process_group(request, seat)
        value = pickle.dumps(body(*args, **kwargs))
    except SystemExit:
        raise
    except BaseException as error:
        reason = _skip_reason(error)
        if reason is not None:
            return wire.RankReport(wire.Verdict.SKIPPED, reason)
        return wire.RankReport(wire.Verdict.FAILED, _traceback_of(error))
    del body, args, kwargs

    # Ranks leave together: one that closes its sockets while a peer is still in its last collective fails that peer.
    wire.send(seat.line, wire.BODY_DONE)
    wire.receive(seat.line)
    try:
        if dist.is_initialized():
            destroy_all_groups()
        leaks = (*left_behind(before), *socket_files.left()) if socket_files is not None else ()
    except Exception as error:
        return wire.RankReport(wire.Verdict.FAILED, "after the body:\n" + _traceback_of(error))
    return wire.RankReport(wire.Verdict.PASSED, value=value, leaks=leaks)


def _init_process_group(request: wire.RunRequest, seat: Seat) -> None:
    assert request.backend is not None
    # A fresh prefix in a store that outlives every rank: rank 0 may be the one that a test kills.
    store = TCPStore("127.0.0.1", seat.store_port, None, False, timedelta(seconds=30))
    if "nccl" in request.backend:
        torch.cuda.set_device(seat.rank % torch.cuda.device_count())
    dist.init_process_group(
        request.backend,
        store=PrefixStore(seat.run_id, store),
        rank=seat.rank,
        world_size=request.world_size,
        # Later than the harness's own limit, which shows where the ranks are instead of who gave up first.
        timeout=timedelta(seconds=request.timeout_s + 30),
    )


def _skip_reason(error: BaseException) -> str | None:
    outcomes: Any = sys.modules.get("_pytest.outcomes")  # a rank that never imported pytest must not pay for it here
    skips = (unittest.SkipTest,) if outcomes is None else (unittest.SkipTest, outcomes.Skipped)
    return str(error) if isinstance(error, skips) else None


def _traceback_of(error: BaseException) -> str:
    """The traceback from the body on: the frames of this file are the same for every failure."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__ and tb.tb_next is not None:
        tb = tb.tb_next
    lines: list[Any] = traceback.format_exception(type(error), error, tb)
    return "".join(lines)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
