"""State of polling one worker: back-off after timeouts, and reports that are not believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.errors import Unauthorized, WorkerTimeout, WorkerUnreachable
from specdecode_operator.telemetry.worker_client import Reading, Unchanged
from specdecode_operator.telemetry.worker_poll import MAX_BACKOFF_SECONDS, Target, WorkerPoll
from specdecode_worker.contract import Report
from support.operators.socket_workers import good_report

PERIOD = 5.0
TARGET = Target(uid="u1", name="pod-1", address="10.0.0.1", ready=True)


def report(**fields: Any) -> Report:
    return Report.model_validate(good_report(**fields))


def timed_out(poll: WorkerPoll, started: float) -> WorkerPoll:
    return poll.failed(WorkerTimeout("late"), started=started, at=1e9, period=PERIOD)


def test_calls_that_hang_are_made_less_often() -> None:
    poll, now, waits = WorkerPoll(target=TARGET), 1000.0, []
    for _ in range(7):
        poll = timed_out(poll, now)
        waits.append(max(0.0, poll.not_before - now))
    assert waits == [0, 7.5, 17.5, MAX_BACKOFF_SECONDS - 2.5, 27.5, 27.5, 27.5]


@pytest.mark.parametrize("error", [WorkerUnreachable("refused"), Unauthorized("401")])
def test_calls_that_fail_at_once_are_repeated_each_round(error: Exception) -> None:
    poll = WorkerPoll(target=TARGET)
    for _ in range(5):
        poll = poll.failed(error, started=1000, at=1e9, period=PERIOD)
    assert poll.not_before == 0
    assert poll.is_unauthorized is isinstance(error, Unauthorized)


@pytest.mark.parametrize(
    ("before", "now", "at_once"),
    [
        ({"ready": False}, {"ready": True}, True),
        ({}, {"address": "10.0.0.2"}, True),
        ({}, {}, False),
        ({}, {"ready": False}, False),
    ],
)
def test_a_pod_that_became_ready_is_asked_at_once(before: dict[str, Any], now: dict[str, Any], at_once: bool) -> None:
    poll = WorkerPoll(target=replace(TARGET, **before))
    for _ in range(4):
        poll = timed_out(poll, 1000)
    assert (poll.follow(replace(TARGET, **now)).not_before == 0) is at_once


def test_an_answer_ends_the_back_off() -> None:
    poll = WorkerPoll(target=TARGET)
    for _ in range(4):
        poll = timed_out(poll, 1000)
    poll = poll.answered(Reading(report()), started=1030, at=1e9)
    assert (poll.timeouts, poll.not_before, poll.has_report) == (0, 0, True)


def test_a_counter_that_fell_is_not_believed_until_it_has_risen_again() -> None:
    first = report()
    poll = WorkerPoll(target=TARGET).answered(Reading(first, '"a"'), started=1, at=1e9)
    fallen = first.model_copy(update={"drafts": first.drafts - 1, "clock_seconds": first.clock_seconds + 5})
    poll = poll.answered(Reading(fallen, '"b"'), started=6, at=1e9)
    assert poll.reading is not None
    assert poll.reading.report is None
    assert poll.reading.problem == f"drafts: fell from {first.drafts} to {first.drafts - 1} within one boot"
    assert poll.baseline is not None
    assert poll.baseline.tag == '"a"'
    restarted = fallen.model_copy(update={"boot_id": "boot-2"})
    assert poll.answered(Reading(restarted), started=11, at=1e9).has_report
    risen = first.model_copy(update={"drafts": first.drafts + 1, "clock_seconds": first.clock_seconds + 10})
    assert poll.answered(Reading(risen), started=11, at=1e9).has_report


def test_an_unchanged_report_has_the_new_clock() -> None:
    first = report()
    poll = WorkerPoll(target=TARGET).answered(Reading(first, '"a"'), started=1, at=1e9)
    poll = poll.answered(Unchanged(first.clock_seconds + 5), started=6, at=1e9 + 5)
    assert poll.reading is not None
    assert poll.reading.report == first.model_copy(update={"clock_seconds": first.clock_seconds + 5})
    assert (poll.reading.at, poll.reading.tag) == (1e9 + 5, '"a"')
