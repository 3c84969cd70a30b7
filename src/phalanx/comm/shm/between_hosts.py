"""The connections of a group between hosts: c10d's Gloo, moving bytes directly from rank to rank.

Gloo cannot be woken when the group fails elsewhere, so its waits run on a thread of their own, and the caller watches
the group's fate meanwhile. A rank that finds a failure writes it to the store: ranks on other hosts read there what
lies behind a closed connection.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import Work

from phalanx.comm.shm.arguments import Landing, readable
from phalanx.comm.shm.failure import Failure, Fate
from phalanx.comm.shm.p2p import ANY

_HEADER_BYTES = 512
_LOOK_S = 0.05  # how often a waiting thread looks at the group's fate
_WORD_S = 2.0  # how long the reason behind a closed connection may take to reach the store


class BetweenHosts:
    """`ours` carries the group's collectives, `everyone` its users' sends and receives: tags never meet."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, fate: Fate) -> None:
        self._fate = fate
        self._store = PrefixStore("fate/", store)
        self._ours: Any = dist.ProcessGroupGloo(PrefixStore("ours/", store), rank, size, timeout)
        self.everyone: Any = dist.ProcessGroupGloo(PrefixStore("everyone/", store), rank, size, timeout)
        fate.on_failure(lambda failure: threading.Thread(target=self._write, args=(failure,), daemon=True).start())

    def swap(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], *, timeout_s: float, said: str) -> None:
        """Send to and receive from ranks of other hosts, all at once, until done. Empty tensors do not travel."""
        gloo = self._ours
        if gloo is None:
            self._fate.check()
            raise RuntimeError(f"{said}: the connections between hosts are closed")
        works: list[tuple[int, Any]] = []
        try:
            works += [(r, gloo.recv([t], r, 0)) for r, t in receives.items() if t.numel()]
            works += [(r, gloo.send([t], r, 0)) for r, t in sends.items() if t.numel()]
        except RuntimeError as error:
            raise self._broken(-1, error, said=said, timeout_s=timeout_s) from error
        if not works:
            return
        done = threading.Event()
        trouble: list[tuple[int, Exception]] = []
        limit = timedelta(seconds=timeout_s)

        def wait() -> None:
            for rank, work in works:
                try:
                    work.wait(limit)
                except Exception as error:
                    trouble.append((rank, error))
                    break
            done.set()

        threading.Thread(target=wait, name="phalanx-net", daemon=True).start()
        while not done.wait(_LOOK_S):
            self._fate.check()
        if trouble:
            raise self._broken(*trouble[0], said=said, timeout_s=timeout_s) from trouble[0][1]

    def agree(self, others: list[int], said: str, *, timeout_s: float) -> None:
        """That the ranks in `others`, on other hosts, are in the same call."""
        if not others:
            return
        own = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
        raw = said.encode()[:_HEADER_BYTES]
        own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        theirs = {r: torch.zeros_like(own) for r in others}
        self.swap(dict.fromkeys(others, own), theirs, timeout_s=timeout_s, said=said)
        for rank, header in theirs.items():
            if not torch.equal(header, own):
                call = bytes(header.tolist()).rstrip(b"\0").decode(errors="replace")
                pair = sorted([(self._fate.rank, said), (rank, call)])
                text = "; ".join(f"rank {r} called {c}" for r, c in pair)
                raise self._fail(Failure("mismatch", rank, f"ranks called different collectives: {text}"))

    def check_lengths(self, sent: Mapping[int, int], wanted: Mapping[int, int], *, timeout_s: float, said: str) -> None:
        """Gloo hangs, or writes past the end, where two ranks disagree on a length; say so first."""
        told = {r: torch.zeros(1, dtype=torch.int64, device="cpu") for r in wanted}
        self.swap(
            {r: torch.tensor([n], device="cpu").view(torch.uint8) for r, n in sent.items()},
            {r: t.view(torch.uint8) for r, t in told.items()},
            timeout_s=timeout_s,
            said=said,
        )
        for rank, length in told.items():
            if int(length) != wanted[rank]:
                text = (
                    f"ranks disagree on lengths: in {said} rank {rank} sends {int(length)} bytes, rank "
                    f"{self._fate.rank} expects {wanted[rank]}"
                )
                raise self._fail(Failure("mismatch", rank, text))

    # ---- the users' point-to-point ---------------------------------------------------------------------------

    def send(self, tensor: Tensor, rank: int, tag: int) -> Work:
        return _Message(self.everyone.send([readable(tensor)], rank, tag))

    def recv(self, tensor: Tensor, rank: int, tag: int) -> Work:
        place = Landing(tensor, filled=False)
        flats = [place.flat]
        inner = self.everyone.recv_anysource(flats, tag) if rank == ANY else self.everyone.recv(flats, rank, tag)
        return _Message(inner, place)

    # ---- what goes wrong -------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> Exception:
        return self._fate.fail(failure).error(rank=self._fate.rank, group=self._fate.group)

    def _broken(self, rank: int, error: Exception, *, said: str, timeout_s: float) -> Exception:
        known = self._read()
        if known is not None:
            return self._fail(known)
        if "timed out" in str(error).lower():
            waited = f"{timeout_s * 1000:.0f}ms"
            text = (
                f"Timed out waiting {waited} for rank {rank}, on another host, in {said}: after this timeout: {error}"
            )
            return self._fail(Failure("timeout", rank, text))
        text = f"the connection to rank {rank}, on another host, broke in {said}: {error}"
        return self._fail(Failure("lost", rank, text))

    def _write(self, failure: Failure) -> None:
        try:
            self._store.compare_set("failure", "", failure.encode().decode())
        except Exception:  # the store may be gone with its host
            return

    def _read(self) -> Failure | None:
        try:
            self._store.wait(["failure"], timedelta(seconds=_WORD_S))
            return Failure.decode(self._store.get("failure"))
        except Exception:  # nobody wrote, or the store is gone
            return self._fate.failure

    def close(self) -> None:
        self._ours = None
        self.everyone = None


class _Message(Work):
    """Gloo's own work, which may be waited for once, and then the way home of a tensor that is not contiguous."""

    def __init__(self, inner: Any, place: Landing | None = None) -> None:
        super().__init__()
        self._inner = inner
        self._place = place
        self._lock = threading.Lock()
        self._done = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            if not self._done:
                self._inner.wait(*([timeout] if timeout.total_seconds() > 0 else []))
                if self._place is not None:
                    self._place.land()
                self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    source_rank = _source_rank
