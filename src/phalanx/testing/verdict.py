"""From what became of the ranks to what the test is told: nothing, a skip, or one error that shows everything."""

from __future__ import annotations

import signal
import unittest
from collections.abc import Iterable
from pathlib import Path

from phalanx.testing import wire


class RanksFailed(AssertionError):
    """A run in ranks went wrong. The text has every rank's traceback, stacks, output and leaks, first failure first."""


def judge(request: wire.RunRequest, result: wire.RunResult, name: str) -> None:
    """Raise `RanksFailed` unless every rank ended as it should; raise the skip when all ranks skipped."""
    if result.refused:
        raise RanksFailed(f"{name}: cannot fork ranks: {result.refused}")
    reasons = [o.report.text for o in result.outcomes if o.report and o.report.verdict is wire.Verdict.SKIPPED]
    if reasons and len(reasons) == request.world_size:
        raise _skip(reasons[0])

    outcomes = sorted(result.outcomes, key=lambda o: o.order or request.world_size + 1)
    wrong = {o.rank: what for o in outcomes if (what := _what_is_wrong(o, request, bool(reasons)))}
    leaks = [f"[rank {o.rank}] {leak}" for o in outcomes if o.report for leak in o.report.leaks]
    leaks += [f"[ranks] {leak}" for leak in result.leaks]
    if not wrong and not leaks:
        return

    if wrong:
        headline = f"{_listed(wrong)} of {request.world_size} failed"
        if result.timed_out:
            headline = f"timed out after {request.timeout_s:g} s with {_listed(wrong)} unfinished or failed"
    else:
        headline = "the body passed and left something behind"
    sections = [f"{name}: {headline}"]
    sections += [f"[rank {rank}] {what}" for rank, what in wrong.items()]
    if leaks:
        sections.append("left behind:\n" + "\n".join(leaks))
    sections += [shown for o in outcomes if (shown := output_of(o))]
    raise RanksFailed("\n\n".join(sections))


def output_of(outcome: wire.RankOutcome) -> str:
    """What a rank printed, each line with its rank."""
    if not outcome.output.strip():
        return ""
    return "\n".join(f"[rank {outcome.rank}] {line}" for line in outcome.output.rstrip().splitlines())


def _what_is_wrong(outcome: wire.RankOutcome, request: wire.RunRequest, somebody_skipped: bool) -> str:
    expected = request.expect_exit.get(outcome.rank)
    report = outcome.report
    if outcome.killed:
        stacks = _without_harness(outcome.stacks) or "(it did not answer the request for its stacks)"
        return f"was {outcome.killed}; it was here:\n{stacks}"
    if report is not None and report.verdict is wire.Verdict.FAILED:
        return report.text.rstrip()
    if report is None and outcome.exit_code != expected:
        wanted = "" if expected is None else f", expected {_exit_in_words(expected)}"
        return f"{_exit_in_words(outcome.exit_code)} before its body returned{wanted}"
    if report is not None and expected is not None:
        return f"was expected to end with {_exit_in_words(expected)} and returned from its body"
    if report is not None and report.verdict is wire.Verdict.PASSED and somebody_skipped:
        return "passed while another rank skipped: ranks must agree to skip"
    return ""


def _without_harness(stacks: str) -> str:
    """Stacks without the frames below the body, which are the same in every rank; the innermost frame always stays."""
    ours = tuple(f"{Path(__file__).parent / name}.py" for name in ("rank", "crew", "server")) + ("<frozen runpy>",)
    threads = [block.splitlines() for block in stacks.strip().split("\n\n")]
    for lines in threads:
        while len(lines) > 2 and lines[-1].strip(' File"').startswith(ours):
            lines.pop()
    return "\n\n".join("\n".join(lines) for lines in threads)


def _exit_in_words(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit code {code}"


def _listed(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _skip(reason: str) -> BaseException:
    try:
        from _pytest.outcomes import Skipped
    except ImportError:
        return unittest.SkipTest(reason)
    return Skipped(reason)
