"""What the ranks say of a step: written by each, read by all, at once or, where that would stop the host, a step later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.comm.device_wait import is_capturing
from phalanx.comm.group import Group
from phalanx.errors import PeerFailedError, PhalanxError, ReducerStateError
from phalanx.reducer.deferred import DeferredReport
from phalanx.reducer.layout import Layout
from phalanx.reducer.unused import Flag, Report
from phalanx.reducer.weights import wrong_weights


class Reports:
    """This rank's report of the step under way, and what is not known yet of the last."""

    def __init__(self) -> None:
        self._said = Report(None, [], [], [])
        self.is_usual = True
        """Whether this rank has nothing to tell of this step but that all went well."""
        self.awaited: DeferredReport | None = None
        """Of the last step, where it is still to be read."""
        self.queued: DeferredReport | None = None
        """The same, also when it is read or given up."""
        self._fetches: bool | None = None  # whether it is to be read late, and then whether it is an average
        self._hindsight: PhalanxError | None = None
        self._is_captured = False  # the step under way, whose report was written

    def say(
        self, layout: Layout, *, used: Sequence[bool] | None, late: Sequence[int], weight: float, flags: int
    ) -> None:
        """Settle what this rank has to tell; `write` puts it where it travels."""
        if used is None and not late and weight == 1.0 and not flags:
            self.say_nothing(layout)
            return
        self._said = layout.control.alone(used=used, late=late, weight=weight, flags=flags)
        self.is_usual = used is None and not late and weight == 1.0 and not flags & ~Flag.EVALUATING

    def say_nothing(self, layout: Layout) -> None:
        """All went well: what is said in most steps."""
        self._said = layout.control.nothing_alone
        self.is_usual = True

    def write(self, layout: Layout) -> None:
        said, control, tensor = self._said, layout.control, layout.control_tensor
        self._is_captured = layout.on_streams and is_capturing(tensor.device)
        if self._is_captured:
            control.note_capture()
        if said is control.nothing_alone:
            control.write_nothing(tensor)
            return
        used = None if said.used is None else [bool(one) for one in said.used]
        control.write(tensor, used=used, late=said.late, weight=said.weights[0], flags=said.flags[0])

    def read(self, layout: Layout, *, communicates: bool, averaged: bool, now: bool, by: Group) -> Report:
        """What all ranks have to say of this step; or what this rank expects them to, where reading can wait."""
        said, self._fetches = self._said, None
        if not communicates:
            return said
        if now or layout.deferred is None:
            control, tensor = layout.control, layout.control_tensor
            if tensor.is_cpu and control.is_usual(tensor, control.num_written):
                return control.nothing
            report = control.read(by.read(tensor), averaged=averaged)
            return report if layout.deferred is None else report.without(Flag.EVALUATING)
        self._fetches = averaged
        # Whether the others' modules train is not known here: then buffers are synchronised in any case, alike on all.
        return layout.control.expected(said.flags[0] & ~Flag.EVALUATING)

    def fetch(self, layout: Layout) -> None:
        """Behind all that this step queues: what is read late is on its way from now on."""
        averaged, self._fetches = self._fetches, None
        if averaged is not None and layout.deferred is not None and not self._is_captured:
            layout.deferred.start(layout.control_tensor, averaged=averaged)
            self.awaited = self.queued = layout.deferred

    def last_was_usual(self) -> bool:
        """Whether what is awaited is there, and nobody has anything to tell: then it is read. So in nearly every step."""
        if self.awaited is None or not self.awaited.is_usual():
            return False
        self.awaited = None
        return True

    def read_awaited(
        self, layout: Layout, wait: Callable[[DeferredReport], None], *, rank: int, step: int
    ) -> Report | None:
        """Before a step sends anything: what the others had to say of the last one, where this rank has gone on.

        Returns the report where all ranks must act on it. An error in it is kept, and raised when this step is over:
        raised now, this rank would send nothing, and the others, who have known since the last step, would add up their
        gradients of this one with this rank's of the next.
        """
        if self.awaited is None or is_capturing(layout.control_tensor.device):
            return None
        awaited, self.awaited = self.awaited, None
        wait(awaited)
        report = awaited.read()
        if report is None:
            return None
        failed = report.ranks_with(Flag.FAILED)
        if failed:
            self._hindsight = PeerFailedError(
                f"rank {failed[0]} raised in its backward pass of step {step - 1}, the step before this one, which "
                "this rank has finished: its gradients lacked that rank's part. Go back to a checkpoint, or stop",
                failed_ranks=failed,
                rank=rank,
                step=step - 1,
            )
        elif wrong := wrong_weights(report):  # this rank gave none
            self._hindsight = ReducerStateError(wrong, rank=rank, step=step - 1)
        return report if report.ranks_with(Flag.CHANGED) else None

    def raise_hindsight(self) -> None:
        """Raise what was read of the last step, now that this one is over."""
        error, self._hindsight = self._hindsight, None
        if error is not None:
            raise error

    def forget(self) -> None:
        """Another group: what the old one's ranks had to say may never be there to read."""
        self.awaited = self.queued = self._fetches = self._hindsight = None
