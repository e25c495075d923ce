"""Stale reports are counted by rounds of reports, not by steps of the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from specdecode_operator.decision.learn import STALE_LOOKS, count_silent, stale_workers
from specdecode_operator.state.learned import Session
from specdecode_operator.types import Observation, Worker
from specdecode_worker.contract import DraftState, Report

POD = Worker(name="pod-1", uid="u1", address="10.0.0.1", ready=True)
REPORT = Report(boot_id="b", worker="w", clock_seconds=1, draft=DraftState(method="eagle3"))


class Round(NamedTuple):
    """A round of reports of one worker."""

    number: int
    at: float
    problem: str | None = None
    report: Report | None = None


def failed(number: int, at: float, problem: str = "no answer") -> Round:
    return Round(number, at, problem)


def after(*rounds: Round, ticks: int = 1, worker: Worker = POD) -> dict[str, str]:
    """Return the stale workers after these rounds, with so many steps of the loop after each."""
    session = Session()
    for read in rounds:
        for _ in range(ticks):
            read_worker = replace(worker, report=read.report, report_problem=read.problem)
            observed = Observation(workload=None, workers=(read_worker,), session=session, round=read.number)
            session = replace(session, silent=count_silent(observed, read.at), round=read.number)
    return stale_workers(observed, session, rounds[-1].at)


def test_a_worker_is_stale_after_rounds_and_time() -> None:
    rounds = [failed(number, 100 + 15 * number) for number in range(1, 4)]
    assert after(*rounds[:2]) == {}
    assert after(*rounds) == {"pod-1": "no answer"}


def test_ticks_between_rounds_do_not_count() -> None:
    assert after(failed(1, 100), failed(2, 140), ticks=10 * STALE_LOOKS) == {}


def test_many_rounds_in_a_short_time_are_not_stale() -> None:
    assert after(*(failed(number, 100 + number) for number in range(1, 20))) == {}


def test_the_first_reason_is_shown() -> None:
    rounds = [failed(number, 100 + 30 * number, f"attempt {number}") for number in range(1, 5)]
    assert after(*rounds) == {"pod-1": "attempt 1"}


def test_a_report_ends_the_silence() -> None:
    rounds = [failed(number, 100 + 30 * number) for number in range(1, 5)]
    fresh = Round(5, 250, report=REPORT)
    assert after(*rounds, fresh) == {}
    assert after(*rounds, fresh, failed(6, 280)) == {}


@pytest.mark.parametrize("change", [{"ready": False}, {"leaving": True}])
def test_only_ready_workers_that_stay_are_stale(change: dict[str, bool]) -> None:
    worker = Worker(**{"name": "pod-1", "uid": "u1", "address": "10.0.0.1", "ready": True, **change})
    assert after(*(failed(number, 100 + 30 * number) for number in range(1, 5)), worker=worker) == {}


def test_a_ready_worker_without_any_reading_is_silent() -> None:
    rounds = [Round(number, 100 + 30 * number) for number in range(1, 5)]
    assert after(*rounds) == {"pod-1": "no report"}
