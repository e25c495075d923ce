"""Drift as users see it (condition, Events, history, metrics and explain), and the training runs that it requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import metrics
from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.deployment_loop import event_notices
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.metrics import DRIFT_EVIDENCE, DRIFT_LOSS
from specdecode_operator.plugin.explain import past
from specdecode_operator.rollout.runs import first_run_seconds, worth_of_drift
from specdecode_operator.state.learned import UNUSED, DraftRecord, parse_training, render_training
from specdecode_operator.types import Observation, Outcome
from support.operators.drifting import DAY, USUAL, Drifting, after_a_drift, after_a_week, drifting
from support.operators.fleet import DEFAULTS, workload_with
from support.operators.statuses import conditions, explained, resource_of, states


@pytest.fixture
def served() -> Drifting:
    return after_a_week()


@pytest.fixture
def stale() -> Drifting:
    served = after_a_drift()
    assert served.session.drafts == UNUSED
    return served


def shown(served: Drifting) -> Status:
    """Return the status of one more decision, and keep it in the deployment."""
    observed = Observation(workload=workload_with(), workers=(), session=served.session)
    decision, _ = decide(served.deployment, observed, DEFAULTS, now=served.now)
    status = status_of(served.deployment, observed, decision, Outcome(), now=served.now)
    metrics.record(served.deployment, observed, decision, status)
    served.deployment = replace(served.deployment, status=status)
    return status


def fresh(served: Drifting) -> Condition | None:
    return conditions(shown(served)).get("DraftFresh")


def series(gauge: Any) -> dict[tuple[str, ...], float]:
    return gauge._values.get(("ns", "demo"), {})


def explanation(served: Drifting) -> str:
    shown(served)
    return explained(resource_of(served.deployment), served.session.learned, served.now)


@pytest.mark.parametrize(
    ("waited", "left"), [(5, "2 days"), (6.5, "12 hours"), (6.97, "44 minutes"), (6.9999, "1 minute")]
)
def test_the_condition_counts_in_the_largest_unit(waited: float, left: str) -> None:
    served = drifting(requests_per_day=240)
    served.serve(20)
    began = served.session.learned.drift.own_tasks[0].learning.began
    served.wait(began + waited * DAY - served.now)
    assert fresh(served).message == f"the baseline is learnt, {left} left"


def test_the_condition_counts_the_days_of_the_baseline() -> None:
    served = drifting(requests_per_day=240)
    condition = fresh(served)
    assert (condition.status, condition.reason) == ("Unknown", "LearningBaseline")
    assert condition.message == "the baseline takes 168h from the first 20 requests on"
    served.serve(20)
    served.wait(2.5 * DAY)
    assert fresh(served).message == "the baseline is learnt, 5 days left"
    served.wait(5 * DAY)
    assert fresh(served).message == "168h had too few requests for a baseline, so it is still learnt"


def test_the_condition_does_not_exist_without_a_draft_in_use(served: Drifting) -> None:
    served.change(speculation={"mode": "Off"})
    assert fresh(served) is None
    assert fresh(drifting(pods=[])) is None, "no worker has reported"


def test_a_fresh_draft_has_numbers(served: Drifting) -> None:
    served.serve(200)
    condition = fresh(served)
    assert (condition.status, condition.reason) == ("True", "Fresh")
    assert condition.message.startswith("speed against the baseline of 168h: other ")
    assert condition.message.endswith(" %")


def test_a_stale_draft_names_task_loss_and_worth(stale: Drifting) -> None:
    condition = fresh(stale)
    assert (condition.status, condition.reason) == ("False", "DraftStale")
    assert "task other: 2" in condition.message or "task other: 1" in condition.message
    assert "% slower than the baseline, found 1970-01-" in condition.message
    assert "Stale drafts cost" in condition.message
    assert stale.deployment.status.reason.startswith("DraftStale: ")


def test_another_image_shows_as_a_new_baseline(served: Drifting) -> None:
    served.change(workers={"image": "localhost/worker:2"})
    served.serve(20)
    served.serve(20)
    condition = fresh(served)
    assert (condition.status, condition.reason) == ("Unknown", "LearningBaseline")
    assert condition.message.endswith("left; the workers' image changed (ImageChanged)")


@pytest.mark.slow
def test_a_changed_mix_leaves_the_draft_fresh() -> None:
    served = drifting({"chat": USUAL, "code": (0.4, 0.3, 0.3)}, shares={"chat": 0.7, "code": 0.3}, requests_per_day=400)
    served.serve(3000)
    served.shares.update(chat=0.1, code=0.9)
    served.serve(2400)
    (record,) = served.records
    assert (record.load, record.cause) == ("all tasks", "mix")
    assert "the mix of tasks changed" in record.reason
    assert states(shown(served))["DraftFresh"] == ("True", "MixChanged")
    assert "(all)" in explanation(served)
    assert set(series(DRIFT_LOSS)) == {("chat",), ("code",)}


def test_begin_and_end_are_events_and_history(stale: Drifting) -> None:
    before = shown(stale)
    served = stale
    served.rates["other"] = USUAL
    served.serve(1600)
    notices = event_notices(before, before, served.records)
    assert [(notice.type, notice.reason) for notice in notices] == [("Normal", "DraftDrift")] * 2
    assert notices[0].message.startswith("task other: 2.")
    assert "the drift is over" in notices[1].message
    assert states(shown(served))["DraftFresh"] == ("True", "Fresh")
    assert "task other" in "\n".join(past(resource_of(served.deployment), served.now))


def test_metrics_exist_with_the_baseline_alone(stale: Drifting) -> None:
    shown(stale)
    assert series(DRIFT_LOSS)["other",] == pytest.approx(0.2, abs=0.05)
    assert series(DRIFT_EVIDENCE)["other",] >= 1
    served = after_a_drift()
    served.change(workers={"image": "localhost/worker:2"})
    served.serve(40)
    shown(served)
    assert series(DRIFT_LOSS) == series(DRIFT_EVIDENCE) == {}
    shown(stale)
    metrics.forget("ns", "demo")
    assert series(DRIFT_LOSS) == series(DRIFT_EVIDENCE) == {}


def test_explain_shows_baseline_present_evidence_and_worth(stale: Drifting) -> None:
    text = explanation(stale)
    task = stale.task()
    usual, present = task.tokens(stale.now)
    assert f"other {usual:.2f}".rstrip("0") in text
    assert f"{present:.2f}".rstrip("0") in text
    assert "(drift)" in text
    assert "not more than twice the last run's device time (8.0 h)" in text, "the message of DraftFresh"


def test_explain_while_the_baseline_is_learnt() -> None:
    served = drifting(requests_per_day=240)
    assert "learnt from the first 20 requests on" in explanation(served)
    served.serve(60)
    assert "other learning, 3 batches - - -" in explanation(served)


# --- runs -------------------------------------------------------------------------------------------------------------


def distillation(mode: str = "Drift", limit: str = "1m", **trigger: Any) -> dict[str, Any]:
    return {
        "capture": {},
        "storage": {"uri": "pvc://drafts"},
        "trigger": {"mode": mode, **trigger},
        "timeLimit": limit,
    }


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
    (task,) = stale.session.learned.drift.stale
    assert record.captures_deleted_before == task.since, "it learns from requests since the alarm"
    assert 0 < task.since < stale.now
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


def test_no_run_is_requested_in_another_phase_or_within_the_cooldown(stale: Drifting) -> None:
    stale.change(distillation=distillation(cooldown="24h"))
    with_record(stale, phase=Phase.PROMOTING, since=stale.now)
    stale.wait(60)
    assert "drift" not in runs(stale)
    with_record(stale, phase=Phase.COOLDOWN, since=stale.now)
    stale.wait(86_000)
    assert "drift" not in runs(stale)
    stale.wait(600)
    stale.wait(60)
    assert runs(stale)[-1] == "drift"


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
