"""The ranks of one run, seen from the server: fork them, watch them, end them.

One thread, one loop. It wakes on a rank's message, on SIGCHLD (through a wake-up descriptor), when the client goes
away, and at the next deadline. No rank can make it wait: a rank that hangs is a deadline, nothing more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO

from phalanx.testing import rank as rank_process
from phalanx.testing import wire
from phalanx.testing.leaks import children_of, command_of, shm_files, shm_left_behind

_DUMP_S = 2.0  # how long stacks may take to be written before the rank is killed without them
_ORPHAN_S = 1.0  # how long what a rank started may take to end after it
_OUTPUT_BYTES = 200_000


class ClientGone(Exception):
    """The test process closed its end in the middle of a run: there is nobody to answer."""


@dataclass
class _Rank:
    pid: int
    line: socket.socket
    inbox: wire.Inbox
    output: IO[bytes]
    stacks: IO[bytes]
    outcome: wire.RankOutcome
    body_done: bool = False

    @property
    def alive(self) -> bool:
        return self.outcome.exit_code is None


@dataclass
class Crew:
    """One run. `client` and `wakeup` are only watched here; the server owns them."""

    request: wire.RunRequest
    run_id: str
    store_port: int
    client: socket.socket
    wakeup: socket.socket
    keeper_pid: int
    keeper_died: bool = False
    _ranks: list[_Rank] = field(default_factory=list)
    _seen: int = 0

    def run(self) -> wire.RunResult:
        """Fork the ranks and return when all of them are gone, with everything they started."""
        shm_before = shm_files()
        bystanders = {*children_of(os.getpid())}
        try:
            master_port = _free_port()
            for index in range(self.request.world_size):
                self._fork(index, master_port)
            timed_out = self._watch()
        finally:  # also when the client is gone
            self._kill_ranks()
            leaks = self._end_orphans(bystanders)
            self._close()
        if not self.request.check_leaks or any(self._is_failure(r) or r.outcome.killed for r in self._ranks):
            leaks = []  # a failed run may well leave something; its failure is the news
        else:
            leaks += shm_left_behind(shm_before)
        return wire.RunResult([r.outcome for r in self._ranks], leaks, timed_out)

    def _fork(self, index: int, master_port: int) -> None:
        ours, theirs = socket.socketpair()
        output, stacks = tempfile.TemporaryFile(buffering=0), tempfile.TemporaryFile(buffering=0)
        server_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            for sibling in self._ranks:
                sibling.line.close()
            for inherited in (ours, self.client, self.wakeup):
                inherited.close()
            seat = rank_process.Seat(
                index, theirs, output, stacks, self.store_port, master_port, self.run_id, server_pid
            )
            rank_process.main(self.request, seat)
        theirs.close()
        self._ranks.append(_Rank(pid, ours, wire.Inbox(ours), output, stacks, wire.RankOutcome(index)))

    def _watch(self) -> bool:
        """Wait for the ranks; returns whether they ran out of time."""
        deadline = time.monotonic() + self.request.timeout_s
        grace_until: float | None = None
        while any(r.alive for r in self._ranks):
            limit = deadline if grace_until is None else min(deadline, grace_until)
            if not self._wait(limit):
                timed_out = limit == deadline
                failed = next((r.outcome.rank for r in self._by_order() if self._is_failure(r)), None)
                self._dump_stacks(
                    f"still running after {self.request.timeout_s:g} s"
                    if timed_out
                    else f"still running {self.request.grace_s:g} s after rank {failed} failed"
                )
                return timed_out
            self._tell_to_tear_down()
            if grace_until is None and any(self._is_failure(r) for r in self._ranks):
                grace_until = time.monotonic() + self.request.grace_s
        return False

    def _wait(self, until: float) -> bool:
        """Handle what has happened, waiting for the next thing if nothing has. False when `until` passed instead."""
        remaining = until - time.monotonic()
        if remaining <= 0:
            return False
        lines = {r.line: r for r in self._ranks if r.alive and not r.inbox.closed}
        ready, _, _ = select.select([self.client, self.wakeup, *lines], [], [], remaining)
        if self.client in ready:  # the client says nothing during a run: this is the end of it
            raise ClientGone
        for line in ready:
            if line in lines:
                self._read(lines[line])
        if self.wakeup in ready:
            self.wakeup.recv(4096)
            self._reap()
        return True

    def _read(self, member: _Rank) -> None:
        for message in member.inbox.drain():
            if isinstance(message, wire.RankReport):
                member.outcome.report = message
                self._stamp(member)
            else:
                member.body_done = True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.keeper_died |= pid == self.keeper_pid
            for member in self._ranks:
                if member.pid == pid:
                    self._read(member)  # its last words may still be in the socket
                    member.outcome.exit_code = os.waitstatus_to_exitcode(status)
                    if member.outcome.report is None:
                        self._stamp(member)

    def _stamp(self, member: _Rank) -> None:
        self._seen += 1
        member.outcome.order = self._seen

    def _by_order(self) -> list[_Rank]:
        return sorted(self._ranks, key=lambda r: r.outcome.order)

    def _is_failure(self, member: _Rank) -> bool:
        outcome = member.outcome
        if outcome.report is not None:
            return outcome.report.verdict is wire.Verdict.FAILED
        return outcome.exit_code is not None and outcome.exit_code != self.request.expect_exit.get(outcome.rank)

    def _tell_to_tear_down(self) -> None:
        waiting = [r for r in self._ranks if r.alive and r.body_done]
        if all(r.body_done or not r.alive or r.outcome.report is not None for r in self._ranks):
            for member in waiting:
                member.body_done = False  # told once
                member.line.setblocking(True)
                with contextlib.suppress(OSError):
                    wire.send(member.line, wire.TEAR_DOWN)
                member.line.setblocking(False)

    def _dump_stacks(self, why: str) -> None:
        """Have the remaining ranks write their stacks and die."""
        for member in self._ranks:
            if member.alive:
                member.outcome.killed = why
                # A stopped process takes no signal but SIGKILL until it is continued.
                os.kill(member.pid, rank_process.STACKS_SIGNAL)
                os.kill(member.pid, signal.SIGCONT)
        until = time.monotonic() + _DUMP_S
        while any(r.alive for r in self._ranks) and self._wait(until):
            pass

    def _kill_ranks(self) -> None:
        for member in self._ranks:
            if member.alive:
                _kill(member.pid)
        while any(r.alive for r in self._ranks):
            self._wait_for_child(time.monotonic() + 1.0)

    def _end_orphans(self, bystanders: set[int]) -> list[str]:
        """Name and kill what the ranks started and left: the server adopts it when they end."""
        reported = [leak for r in self._ranks if r.outcome.report for leak in r.outcome.report.leaks]
        until = time.monotonic() + (0.0 if reported else _ORPHAN_S)
        while (orphans := _orphans(bystanders)) and time.monotonic() < until:
            self._wait_for_child(until)
        leaks = [
            f"process {pid} ({command_of(pid)}) outlived its rank"
            for pid in children_of(os.getpid())
            if pid in orphans and not any(leak.startswith(f"process {pid} ") for leak in reported)
        ]
        while orphans:  # what those started comes to us as they end
            for pid in orphans:
                _kill(pid)
            self._wait_for_child(time.monotonic() + 1.0)
            orphans = _orphans(bystanders)
        return leaks

    def _wait_for_child(self, until: float) -> None:
        ready, _, _ = select.select([self.wakeup], [], [], max(0.0, until - time.monotonic()))
        if ready:
            self.wakeup.recv(4096)
        self._reap()

    def _close(self) -> None:
        for member in self._ranks:
            member.outcome.output = _tail(member.output)
            member.outcome.stacks = _tail(member.stacks)
            member.line.close()


def _orphans(bystanders: set[int]) -> list[int]:
    return [pid for pid in children_of(os.getpid(), with_zombies=True) if pid not in bystanders]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tail(file: IO[bytes]) -> str:
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _OUTPUT_BYTES))
        text = file.read().decode(errors="replace")
    return text if size <= _OUTPUT_BYTES else f"[the first {size - _OUTPUT_BYTES} bytes are not shown]\n{text}"


def _free_port() -> int:
    """A port for the body's own `init_process_group`, which has rank 0 listen on it a little later.

    Drawn below the range that the kernel gives to outgoing connections, so that none of those takes it meanwhile.
    """
    for _ in range(100):
        port = 10_000 + int.from_bytes(os.urandom(2), "little") % 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 10000 and 30000")
