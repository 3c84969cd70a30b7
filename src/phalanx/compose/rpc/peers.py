"""What the other ranks are at, asked by RPC: their RPC threads answer whatever their main thread waits for."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import torch.distributed.rpc as rpc

from phalanx.api.ddp import contexts as seam

ANSWER_WITHIN_S = 5.0


@dataclass(frozen=True)
class Peer:
    """One rank's answer. `problem` is why it will not come to a pass in a context; empty where it may."""

    rank: int
    problem: str = ""
    topic: str = ""
    """The step it waits in, where a notice would reach it."""


def where(key: str) -> Peer | None:
    """Runs on the worker that is asked: where this process is with the module of that key. None: it does not know it."""
    rank, engine = seam.known_engine(key)
    if rank is None:
        return None
    if _main_thread_is_in("shutdown", "rpc/api.py"):
        return Peer(rank, "is in rpc.shutdown()")
    if engine is None:
        return Peer(rank, "has let its module go")
    if engine.group.is_at(engine.topic):
        return Peer(rank, "is in a backward pass outside of any context", engine.topic)
    return Peer(rank)


def _main_thread_is_in(function: str, file: str) -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def ask(key: str) -> list[Peer]:
    """Every other worker's answer that came in time. A worker without Phalanx, or one that is gone, gives none."""
    me = rpc.get_worker_info().id
    asked = []
    for worker in rpc.api._get_current_rpc_agent().get_worker_infos():
        if worker.id != me:
            try:
                asked.append(rpc.rpc_async(worker, where, args=(key,), timeout=ANSWER_WITHIN_S))
            except RuntimeError:
                continue
    answers = []
    for future in asked:
        try:
            answers.append(future.wait())
        except Exception:  # whatever the worker raised, or that it did not answer: other waits name who is gone
            continue
    return [answer for answer in answers if answer is not None]
