"""Drift of a draft through the whole decision: reports become batches, a baseline, an alarm, and its end."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace

import pytest

from specdecode_operator.api.draft import Phase
from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.decision.learn import MAX_LEARNING, watched_tasks
from specdecode_operator.drafts.drift import LEARNING_DAYS
from specdecode_operator.rollout.runs import decode_seconds_per_day
from specdecode_operator.state.learned import STATE_KEY, DraftRecord, DriftState, render_state
from specdecode_worker.contract import TrialState
from support.operators.drifting import SLOWER, USUAL, Drifting, Pod, after_a_week, drifting
from support.operators.estimates import spec
from support.operators.fleet import with_spec

pytestmark = pytest.mark.slow

HARD = (0.45, 0.4, 0.35)
"""1.69 tokens a step of a chain of three."""


@pytest.fixture
def served() -> Drifting:
    return after_a_week()


@pytest.fixture(scope="module")
def two_tasks_after_a_week() -> Drifting:
    served = drifting({"chat": USUAL, "code": HARD}, shares={"chat": 0.7, "code": 0.3}, requests_per_day=400)
    served.days(7.2)
    served.serve(400)
    return served


@pytest.fixture
def two_tasks(two_tasks_after_a_week: Drifting) -> Drifting:
    return copy.deepcopy(two_tasks_after_a_week)


# --- what is found ------------------------------------------------------------------------------------------------


def test_a_fall_of_a_fifth_is_detected_within_600_requests() -> None:
    delays = []
    for seed in range(3):
        served = drifting(seed=seed)
        served.days(7.2)
        served.rates["other"] = SLOWER
        delays.append(served.until_drift(1200))
    assert statistics.median(delays) <= 600, delays


def test_a_drift_begins_with_numbers_and_ends_when_the_speed_returns(served: Drifting) -> None:
    served.rates["other"] = SLOWER
    served.until_drift(1200)
    served.serve(400)
    task = served.task()
    assert task.since
    assert task.loss == pytest.approx(0.2, abs=0.04)
    assert task.evidence >= 1
    (begun,) = served.records
    assert (begun.kind, begun.load, begun.cause) == ("Drift", "task other", "drift")
    assert begun.before.endswith("tokens a step")
    assert "% slower than its baseline" in begun.reason
    assert served.session.learned.history[0] == begun
    served.rates["other"] = USUAL
    served.serve(1600)
    assert not served.task().since
    assert [record.cause for record in served.records] == ["drift", "over"]
    served.rates["other"] = SLOWER
    served.serve(1200)
    assert [record.cause for record in served.records] == ["drift", "over", "drift"]


def test_a_faster_draft_is_no_drift(served: Drifting) -> None:
    served.rates["other"] = (0.9, 0.85, 0.8)
    served.serve(1200)
    assert served.records == []
    assert served.task().loss < -0.15


# --- causes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "watched"),
    [
        ([{"name": "code"}, {"name": "other"}], ["code", "other"]),
        ([{"name": "code"}, {"name": "other", "draft": "sql"}], ["code"]),
        ([{"name": "code", "draft": "sql"}, {"name": "chat"}], ["chat", "other"]),
    ],
    ids=["once", "other by its own draft", "code by its own draft"],
)
def test_tasks_that_run_the_deployments_draft_are_watched(tasks: list[dict[str, str]], watched: list[str]) -> None:
    found = watched_tasks(spec(drafts=[{"name": "sql", "uri": "pvc://drafts/sql"}], tasks=tasks))
    assert sorted(found) == watched


def test_one_task_that_falls_is_named_and_the_mix_is_not(two_tasks: Drifting) -> None:
    two_tasks.rates["chat"] = SLOWER
    two_tasks.serve(2400)
    assert two_tasks.begun == ["task chat"]
    assert [task.task for task in two_tasks.drift.stale] == ["chat"]


@pytest.mark.parametrize("is_stale", [True, False])
def test_another_image_begins_a_new_baseline(served: Drifting, is_stale: bool) -> None:
    if is_stale:
        served.rates["other"] = SLOWER
        served.until_drift(1200)
    served.change(workers={"image": "localhost/worker:2"})
    served.serve(40)
    assert served.task().baseline is None
    assert "ImageChanged" in served.drift.renewed
    assert [record.cause for record in served.records] == (["drift", "over"] if is_stale else [])
    served.serve(1200)
    assert len(served.records) == (2 if is_stale else 0), "nothing is found while a baseline is learnt"


@pytest.mark.parametrize(
    ("pods", "model", "reason"),
    [
        ([Pod("p")], {"uri": "embedded://t2"}, "TargetChanged"),
        ([Pod("p2", draft="d2")], {"uri": "embedded://t"}, "the draft changed to d2"),
    ],
    ids=["target", "draft"],
)
def test_another_target_or_draft_voids_the_baseline(
    served: Drifting, pods: list[Pod], model: dict[str, str], reason: str
) -> None:
    served.change(model=model)
    served.pods = copy.deepcopy(pods)
    served.serve(40)
    assert reason in served.drift.renewed
    assert served.task().baseline is None


def test_a_promotion_that_is_taken_back_keeps_the_baseline(served: Drifting) -> None:
    before = served.drift
    promoting = DraftRecord(
        phase=Phase.PROMOTING,
        current="d2",
        candidate="d2",
        previous="",
        is_confirmed=True,
        since=served.now,
        uris={"d2": "file:///d2"},
        spec_draft="embedded://d",
        method="eagle3",
        spec_hash="d1",
        target="embedded://t",
        image="localhost/worker:1",
    )
    served.session = replace(served.session, drafts=promoting)
    served.wait(60)
    assert served.session.learned.draft == "d2"
    served.serve(200)
    assert (served.session.drafts.current, served.session.learned.draft) == ("", "d1")
    assert served.task().baseline.costs == before.task("other").baseline.costs
    assert served.task().detector.batches > before.task("other").detector.batches


# --- what counts --------------------------------------------------------------------------------------------------


def test_another_depth_of_the_plan_is_no_drift(served: Drifting) -> None:
    for depth in (1, 2, 3):
        served.depth = depth
        served.serve(400)
        assert served.task().loss == pytest.approx(0, abs=0.04), depth
    assert served.records == []


def test_a_depth_that_was_never_reached_before_is_no_drift() -> None:
    served = drifting(requests_per_day=240, depth=1)
    served.days(7.2)
    served.depth = 3
    served.serve(600)
    assert served.records == []
    assert served.task().loss == pytest.approx(0, abs=0.04)


def test_requests_without_drafts_fill_no_batch(served: Drifting) -> None:
    before = served.task()
    served.depth = 0
    served.serve(400)
    assert served.task().detector.batches == before.detector.batches


def test_the_worker_that_tries_a_candidate_does_not_count(served: Drifting) -> None:
    before = served.task()
    served.pods[0].trial = TrialState(id="c-1", state="Running")
    served.rates["other"] = HARD
    served.serve(400)
    after = served.task()
    assert (after.detector, after.requests, after.batch) == (before.detector, before.requests, before.batch)


def test_a_baseline_with_too_few_batches_is_learnt_longer_and_then_restarted() -> None:
    served = drifting(requests_per_day=40)
    served.days(10)
    assert served.task().baseline is None
    served.days(7)
    assert served.task().baseline.batches_per_month == pytest.approx(60, abs=4)
    rare = drifting(requests_per_day=20)
    rare.days(10)
    first = rare.task().learning.began
    rare.days(MAX_LEARNING * LEARNING_DAYS)
    assert rare.task().baseline is None
    assert rare.task().learning.began >= first + MAX_LEARNING * LEARNING_DAYS * 86_400


def test_a_baseline_of_minutes_finds_a_drift_of_minutes() -> None:
    trigger = {"baseline": "10m"}
    served = drifting(requests_per_day=86_400, distillation={"trigger": trigger})
    served.serve(580)
    assert served.task().baseline is None
    served.serve(60)
    assert served.task().baseline.batches_per_month == pytest.approx(30 * 86_400 / 20, rel=0.1)
    served.rates = {"other": SLOWER}
    assert served.until_drift(1200) <= 800


def test_a_method_without_a_trained_draft_is_not_watched(served: Drifting) -> None:
    served.deployment = with_spec(served.deployment, speculation=SpeculationSpec.model_validate({"method": "ngram"}))
    served.serve(40)
    assert served.drift == DriftState()


def test_decode_time_is_a_decayed_daily_mean_of_all_workers(served: Drifting) -> None:
    spec = served.deployment.spec
    assert decode_seconds_per_day(spec, served.drift) == pytest.approx(240 * 40 * 0.02, rel=0.02)
    served.wait(3 * 86_400)
    served.serve(20)
    assert decode_seconds_per_day(spec, served.drift) < 0.8 * 240 * 40 * 0.02


# --- state --------------------------------------------------------------------------------------------------------


def test_drift_survives_a_restart(served: Drifting) -> None:
    served.rates["other"] = SLOWER
    served.until_drift(1200)
    before = served.drift
    served.restart_operator()
    assert served.drift == before
    served.serve(400)
    assert [record.cause for record in served.records] == ["drift"]


def test_what_is_stored_is_small_and_a_deployment_without_traffic_stays_as_it_was(two_tasks: Drifting) -> None:
    names = [*(f"t{index}" for index in range(7)), "other"]
    learning = drifting(dict.fromkeys(names, USUAL), requests_per_day=3000)
    learning.per_poll = 200
    learning.days(2)
    assert len(render_state(learning.session.learned)[STATE_KEY]) < 24 * 1024
    assert len(render_state(two_tasks.session.learned)[STATE_KEY]) < 16 * 1024
    before = two_tasks.session.learned
    two_tasks.wait(60)
    assert two_tasks.session.learned.drift is before.drift
