"""Tests in real ranks, for Phalanx's own tests and for its users'.

    from phalanx.testing import ranks

    @ranks(2)
    def test_sum():
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == 2

The body runs in two processes forked from a warm server that has torch imported, so a test costs milliseconds, and it
fails when a rank fails, hangs, or leaves a process, thread, descriptor or shared memory behind.
"""

from phalanx.testing.client import ServerLost, shut_down, warm_up
from phalanx.testing.harness import RankOptions, ranks, run_ranks
from phalanx.testing.meeting import meet
from phalanx.testing.verdict import RanksFailed

__all__ = ["RankOptions", "RanksFailed", "ServerLost", "meet", "ranks", "run_ranks", "shut_down", "warm_up"]
