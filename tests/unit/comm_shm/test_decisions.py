"""The decisions of the shared-memory group that need no processes."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from phalanx.comm.shm import arena, kernels, wire
from phalanx.comm.shm.all_reduce import chunks
from phalanx.comm.shm.blame import Whereabouts, blame
from phalanx.comm.shm.failure import Failure, Fate
from phalanx.comm.shm.memory import anonymous
from phalanx.comm.shm.peer import how_it_ended
from phalanx.comm.shm.rendezvous import partition
from phalanx.errors import CollectiveTimeoutError, GroupAbortedError, MismatchError, PeerFailedError, PeerLostError


def test_hosts_are_cliques_of_ranks_that_reached_each_other() -> None:
    assert partition({0: [1], 1: [0], 2: [3], 3: [2]}) == [[0, 1], [2, 3]]
    assert partition({0: [2], 1: [3], 2: [0], 3: [1]}) == [[0, 2], [1, 3]]
    assert partition({0: [], 1: [], 2: []}) == [[0], [1], [2]]
    assert partition({0: [1, 2], 1: [0], 2: [0]}) == [[0, 1], [2]], "1 and 2 cannot reach each other"
    assert partition({0: [1], 1: []}) == [[0], [1]], "reached in one direction only"


@given(numel=st.integers(0, 10_000), count=st.integers(1, 9), size=st.sampled_from([1, 2, 4, 8, 16]))
def test_chunks_cover_everything_once_and_share_no_cache_line(numel: int, count: int, size: int) -> None:
    cuts = chunks(numel, count, size)
    assert len(cuts) == count and cuts[0][0] == 0 and cuts[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    assert all(start * size % 64 == 0 or start == numel for start, _ in cuts)


@given(nbytes=st.integers(1, 1 << 34))
def test_segments_are_whole_pages_and_waste_at_most_a_quarter(nbytes: int) -> None:
    rounded = arena.rounded(nbytes)
    assert rounded % 4096 == 0 and rounded >= nbytes
    assert rounded <= max(nbytes * 1.25, nbytes + 4096)


def test_the_arena_reuses_what_fits_and_refuses_what_is_not_its_own() -> None:
    here = arena.Arena(anonymous(4096))
    number, new = here.choose(10_000)
    assert new
    here.make(number, 10_000)
    tensor = here.tensor(number, 2_500, torch.float32)
    assert here.locate(tensor[100:]) == (number, 400) and here.locate(torch.ones(3)) is None
    here.release(tensor)
    with pytest.raises(ValueError, match="twice"):
        here.release(tensor)
    assert here.choose(9_000) == (number, False)
    assert here.choose(9_000)[1], "it is taken"
    with pytest.raises(ValueError, match="allocate"):
        here.release(torch.ones(2))
    here.close()
    tensor.fill_(2.0)
    assert tensor.sum().item() == 5000, "a tensor outlives the arena"


def test_a_signature_is_the_text_of_the_call() -> None:
    t = torch.ones(2, 3)
    assert wire.signature("all_reduce", tensors=(t,), op="sum") == b"all_reduce(sum) float32[2, 3]"
    assert wire.signature("broadcast", tensors=(t,), root=1) == b"broadcast float32[2, 3] root 1"
    many = wire.signature("all_reduce_coalesced", tensors=tuple(torch.empty(i) for i in range(999)))
    other = wire.signature("all_reduce_coalesced", tensors=tuple(torch.empty(i) for i in [*range(998), 5]))
    assert len(many) <= wire.MAX_SIGNATURE and many != other
    packet = wire.head(wire.ENTRY, 7, signature=b"barrier")
    assert wire.describe(packet) == (7, wire.ENTRY, "barrier") and wire.describe(b"GET / HTTP/1.1\r\n\r\n") is None


@given(st.integers(0, 3), st.integers(0, 2**40), st.integers(-1, 99), st.integers(0, 2**40), st.integers(0, 2**31))
def test_a_parcel_survives_the_wire(mode: int, length: int, segment: int, offset: int, window: int) -> None:
    parcel = wire.Parcel(mode, length, segment, offset, window, 3)
    assert wire.Parcel.unpack(parcel.pack()) == parcel


@pytest.mark.parametrize("own", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["sum", "avg", "product", "min", "max"])
def test_folding_in_place_gives_the_same_bits_whoever_folds(own: int, name: str) -> None:
    torch.manual_seed(1)
    parts = [torch.randn(100) * 10**k for k in range(4)]
    apart = torch.empty(100)
    kernels.fold(name, [p.clone() for p in parts], apart, -1)
    mine = [p.clone() for p in parts]
    kernels.fold(name, mine, mine[own], own)
    assert torch.equal(mine[own], apart)


def test_the_first_failure_wins_and_is_raised_as_its_kind() -> None:
    kinds = {
        "lost": PeerLostError,
        "failed": PeerFailedError,
        "aborted": GroupAbortedError,
        "timeout": CollectiveTimeoutError,
        "mismatch": MismatchError,
    }
    for kind, cls in kinds.items():
        fate = Fate(rank=0, group="g")
        acts: list[Failure] = []
        fate.on_failure(acts.append)
        fate.check()
        first = Failure(kind, 2, "said é")
        assert fate.fail(Failure.decode(first.encode())) == first
        assert fate.fail(Failure("lost", 3, "later")) == first and acts == [first]
        with pytest.raises(cls, match="said é"):
            fate.check()
    with pytest.raises(ValueError, match="one of"):
        Failure("bored", 1, "")


def test_a_goodbye_explains_a_closed_connection() -> None:
    fate = Fate(rank=0, group="g")
    fate.goodbye(1, "it shut the group down")
    assert "rank 1 has left the group (it shut the group down)" in fate.explain(1, "barrier #3").text
    assert "without a word" in fate.explain(2, "barrier #3", timeout_s=0.01).text


def test_blame_follows_the_chain_of_those_who_wait() -> None:
    inside = {1: Whereabouts(5, "barrier #5", True, 2), 2: Whereabouts(5, "barrier #5", True, 3)}
    assert blame(1, 5, 0, inside)[0] == 3 and "does not answer" in blame(1, 5, 0, inside)[1]
    late = {**inside, 3: Whereabouts(4, "all_reduce #4", False, -1)}
    assert blame(1, 5, 0, late) == (3, "rank 3 has not entered it: it has made no call since all_reduce #4")
    busy = {**inside, 3: Whereabouts(4, "all_reduce #4", True, -1)}
    assert "is still in all_reduce #4" in blame(1, 5, 0, busy)[1]
    circle = {1: Whereabouts(5, "barrier #5", True, 0)}
    assert blame(1, 5, 0, circle)[0] == 1
    kept = {1: Whereabouts(4, "broadcast #4", True, 3), 2: Whereabouts(5, "all_reduce #5", True, 1)}
    assert (
        blame(1, 5, 0, kept)[0] == 3 and "does not answer" in blame(1, 5, 0, kept)[1]
    )  # 1 is kept by 3, one call before


def test_how_a_child_ended_is_known_before_and_after_it_is_collected() -> None:
    for end, said in (
        (lambda: os._exit(3), "exit status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"),
    ):
        pid = os.fork()
        if pid == 0:
            end()
        fd = os.pidfd_open(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert said in how_it_ended(pid, fd)
        os.waitpid(pid, 0)
        assert said in how_it_ended(pid, fd) or "not known" in how_it_ended(pid, fd)  # the latter before Linux 6.15
        os.close(fd)


def test_what_was_sent_before_a_hang_up_can_still_be_read() -> None:
    """The mesh relies on it: a dead peer's last packets are used before its death is an error."""
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        a.send(struct.pack("<I", 7))
        b.shutdown(socket.SHUT_RDWR)
        assert b.recv(10) == struct.pack("<I", 7) and b.recv(10) == b""
