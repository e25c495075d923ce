"""Requests of training runs, by drift and by schedule, through the whole decision."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from specdecode_operator.decision.record_stage import is_urgent
from specdecode_operator.drafts.lifecycle import Phase
from specdecode_operator.errors import SpecError
from specdecode_operator.rollout.drift_run import first_run_seconds, worth_of_drift
from specdecode_operator.state.draft_record import UNUSED, DraftRecord, RunRecord, parse_training, render_training
from support.operators.drifting import SLOWER, Drifting, drifting


def distillation(mode: str = "Drift", limit: str = "1m", **trigger: Any) -> dict[str, Any]:
    return {
        "capture": {},
        "storage": {"uri": "pvc://drafts"},
        "trigger": {"mode": mode, **trigger},
        "timeLimit": limit,
    }


@pytest.fixture(scope="module")
def stale_draft() -> Drifting:
    """A deployment that drifts, and trains nothing by itself."""
    served = drifting(requests_per_day=240)
    served.serve(1740)
    served.rates["other"] = SLOWER
    served.until_drift(1200)
    served.serve(200)
    assert [record.kind for record in served.records] == ["Drift"]
    assert served.session.drafts == UNUSED
    return served


@pytest.fixture
def stale(stale_draft: Drifting) -> Drifting:
    return copy.deepcopy(stale_draft)


def runs(served: Drifting) -> list[str]:
    return [str(record.cause) for record in served.records if record.kind == "Draft"]


def with_record(served: Drifting, **fields: Any) -> None:
    """Let the rollout be as after an earlier run."""
    used = {"spec_draft": "embedded://d", "method": "eagle3", "spec_hash": "d1", "target": "embedded://t"}
    record = DraftRecord(**{**used, "image": "localhost/worker:1", **fields})
    served.session = replace(served.session, drafts=record)


def test_a_drift_that_is_worth_it_requests_one_run_with_the_sum(stale: Drifting) -> None:
    stale.change(distillation=distillation())
    stale.wait(60)
    record = stale.session.drafts
    assert (record.phase, record.since, record.spec_hash) == (Phase.COLLECTING, stale.now, "d1")
    (run,) = [one for one in stale.records if one.kind == "Draft"]
    assert (run.after, run.cause) == ("Collecting with the draft of the spec", "drift")
    assert "task other lost 2" in run.reason
    assert "more than twice the last run's device time" in run.reason
    assert parse_training(render_training(record)) == record.model_copy(update={"uris": {}})
    stale.wait(60)
    assert runs(stale) == ["drift"]


def test_mode_schedule_trains_for_drift_too(stale: Drifting) -> None:
    stale.change(distillation=distillation("Schedule", schedule="0 3 1 1 *"))
    stale.wait(60)
    assert runs(stale) == ["drift"]


@pytest.mark.parametrize(
    "spec",
    [
        {"distillation": distillation("Manual")},
        {"distillation": distillation(limit="8h")},
        {"distillation": distillation(), "speculation": {"mode": "Off"}},
    ],
    ids=["manual", "not worth it", "off"],
)
def test_no_run_is_requested(stale: Drifting, spec: dict[str, Any]) -> None:
    stale.change(**spec)
    stale.wait(60)
    stale.wait(60)
    assert runs(stale) == []
    assert stale.session.drafts == UNUSED


@pytest.mark.parametrize("phase", [Phase.COOLDOWN, Phase.PROMOTING])
def test_no_run_is_requested_in_another_phase(stale: Drifting, phase: Phase) -> None:
    stale.change(distillation=distillation())
    with_record(stale, phase=phase, since=stale.now)
    stale.wait(60)
    assert "drift" not in runs(stale)


def test_no_run_is_requested_within_the_cooldown(stale: Drifting) -> None:
    stale.change(distillation=distillation(cooldown="24h"))
    with_record(stale, phase=Phase.COOLDOWN, since=stale.now)
    stale.wait(86_000)
    assert "drift" not in runs(stale)
    stale.wait(600)
    stale.wait(60)
    assert runs(stale)[-1] == "drift"


def test_a_run_for_drift_learns_from_requests_since_the_alarm(stale: Drifting) -> None:
    stale.change(distillation=distillation())
    stale.wait(60)
    (task,) = stale.session.learned.drift.stale
    assert 0 < task.since < stale.now
    assert stale.session.drafts.captures_deleted_before == task.since


def test_the_worth_is_the_sum_of_share_loss_recovery_and_decode_time(stale: Drifting) -> None:
    spec = stale.deployment.spec
    assert first_run_seconds(spec) == 4 * 3600
    drift = stale.drift
    loss = drift.task("other").loss
    assert loss == pytest.approx(0.2, abs=0.04)
    worth = worth_of_drift(spec, drift)
    lost = loss * 240 * 40 * 0.02 * 7
    assert worth.lost_seconds == pytest.approx(lost, rel=0.02)
    assert worth.saved_seconds == pytest.approx(0.5 * lost, rel=0.02)
    assert worth.needed_seconds == 2 * 4 * 3600
    with_record(stale, run_device_seconds=50.0, recovery=0.8)
    stale.wait(5)
    worth = worth_of_drift(spec, stale.drift)
    assert worth.saved_seconds == pytest.approx(0.8 * lost, rel=0.02)
    assert worth.needed_seconds == 100
    container = {"name": "distill", "resources": {"limits": {"nvidia.com/gpu": 4}}}
    template = {"spec": {"containers": [container]}}
    stale.change(workers={"accelerator": {"count": 2}}, distillation={"jobTemplate": template})
    assert worth_of_drift(stale.deployment.spec, stale.drift).saved_seconds == pytest.approx(2 * worth.saved_seconds)
    assert first_run_seconds(stale.deployment.spec) == 4 * 4 * 3600


# --- schedule -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduled() -> Drifting:
    """A deployment without drift, whose schedule is every day at 3 o'clock. It is half past 13."""
    served = drifting(distillation=distillation("Schedule", schedule="0 3 * * *"))
    assert datetime.fromtimestamp(served.now, UTC).strftime("%H:%M") == "13:46"
    return served


def test_a_time_of_the_schedule_requests_a_run(scheduled: Drifting) -> None:
    scheduled.wait(13 * 3600)
    assert runs(scheduled) == []
    scheduled.wait(900)
    assert runs(scheduled) == ["schedule"]
    assert "the time 1970-01-13 03:00 UTC" in scheduled.records[-1].reason
    assert scheduled.session.drafts.phase is Phase.COLLECTING


def test_missed_times_run_once(scheduled: Drifting) -> None:
    scheduled.restart_operator()
    scheduled.wait(3 * 86_400)
    assert runs(scheduled) == ["schedule"]
    with_record(scheduled, since=scheduled.now - 2 * 86_400)
    scheduled.wait(60)
    assert runs(scheduled) == ["schedule"]
    scheduled.wait(86_400)
    assert runs(scheduled) == ["schedule", "schedule"]


def test_a_time_within_the_cooldown_runs_after_it(scheduled: Drifting) -> None:
    with_record(scheduled, phase=Phase.COOLDOWN, since=scheduled.now + 6 * 3600)
    scheduled.wait(20 * 3600)
    assert "schedule" not in runs(scheduled)
    scheduled.wait(11 * 3600)
    scheduled.wait(60)
    assert "schedule" in runs(scheduled)


def test_a_run_whose_beginning_was_not_noted_serves_the_times_before_it(scheduled: Drifting) -> None:
    """The operator was killed before it wrote the time from which the schedule counts."""
    began = scheduled.now + 14 * 3600
    run = RunRecord(id="1", started=began, claim="drafts")
    with_record(scheduled, phase=Phase.DISTILLING, since=began, run=run)
    scheduled.wait(15 * 3600)
    with_record(scheduled, since=scheduled.now - 2 * 86_400)
    scheduled.wait(60)
    assert runs(scheduled) == []


def test_another_schedule_counts_from_now(scheduled: Drifting) -> None:
    scheduled.wait(13 * 3600)
    scheduled.change(distillation=distillation("Schedule", schedule="0 2 * * *"))
    scheduled.wait(1800)
    assert runs(scheduled) == []
    assert scheduled.drift.scheduled_from == scheduled.now


def test_a_new_schedule_is_stored_at_once(scheduled: Drifting) -> None:
    before = scheduled.session.learned
    other = before.model_copy(update={"drift": before.drift.model_copy(update={"schedule": "0 4 * * *"})})
    assert is_urgent(before, other)
    assert not is_urgent(before, before)


@pytest.mark.parametrize("schedule", ["0 25 * * *", "0 0 31 2 *"])
def test_a_schedule_that_is_not_valid_is_a_spec_error_that_names_the_field(schedule: str) -> None:
    with pytest.raises(SpecError, match=r"^distillation\.trigger\.schedule: "):
        drifting(distillation=distillation("Schedule", schedule=schedule))
