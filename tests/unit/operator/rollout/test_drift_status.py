"""Drift as users see it: condition, Events, history, metrics and explain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import metrics
from specdecode_operator.api.v1alpha1 import Condition, Status
from specdecode_operator.controller.deployment_loop import event_notices
from specdecode_operator.controller.status import status_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.metrics import DRIFT_EVIDENCE, DRIFT_LOSS
from specdecode_operator.plugin.explain import past
from specdecode_operator.types import Observation, Outcome
from support.operators.drifting import DAY, USUAL, Drifting, after_a_drift, after_a_week, drifting
from support.operators.fleet import DEFAULTS, workload_with
from support.operators.statuses import conditions, explained, resource_of, states


@pytest.fixture
def served() -> Drifting:
    return after_a_week()


@pytest.fixture
def stale() -> Drifting:
    return after_a_drift()


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
    record = served.records[-1]
    assert (record.load, record.cause) == ("all tasks", "mix")
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
