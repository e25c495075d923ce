"""Requests of training runs by drift, through the whole decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.draft import Phase
from specdecode_operator.rollout.runs import first_run_seconds, worth_of_drift
from specdecode_operator.state.learned import UNUSED, DraftRecord, parse_training, render_training
from support.operators.drifting import Drifting, after_a_drift


def distillation(mode: str = "Drift", limit: str = "1m", **trigger: Any) -> dict[str, Any]:
    return {
        "capture": {},
        "storage": {"uri": "pvc://drafts"},
        "trigger": {"mode": mode, **trigger},
        "timeLimit": limit,
    }


@pytest.fixture
def stale() -> Drifting:
    served = after_a_drift()
    assert served.session.drafts == UNUSED
    return served


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
    worth = worth_of_drift(spec, stale.session.drafts, drift)
    lost = loss * 240 * 40 * 0.02 * 7
    assert worth.lost_seconds == pytest.approx(lost, rel=0.02)
    assert worth.saved_seconds == pytest.approx(0.5 * lost, rel=0.02)
    assert worth.needed_seconds == 2 * 4 * 3600
    with_record(stale, run_device_seconds=50.0, recovery=0.8)
    stale.wait(5)
    worth = worth_of_drift(spec, stale.session.drafts, stale.drift)
    assert worth.saved_seconds == pytest.approx(0.8 * lost, rel=0.02)
    assert worth.needed_seconds == 100
    container = {"name": "distill", "resources": {"limits": {"nvidia.com/gpu": 4}}}
    template = {"spec": {"containers": [container]}}
    stale.change(workers={"accelerator": {"count": 2}}, distillation={"jobTemplate": template})
    doubled = worth_of_drift(stale.deployment.spec, stale.session.drafts, stale.drift)
    assert doubled.saved_seconds == pytest.approx(2 * worth.saved_seconds)
    assert first_run_seconds(stale.deployment.spec) == 4 * 4 * 3600
