"""Collectives between the processes of one host through shared memory: torch.distributed's backend "phalanx"."""

from phalanx.comm.shm.register import register

__all__ = ["register"]
