"""Store of sessions: when the ConfigMap is written, what a new process reads from it, and what damage costs."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.errors import Conflict, NotFound
from specdecode_operator.state import learned as learned_module
from specdecode_operator.state.learned import (
    STATE_KEY,
    TRAINING_KEY,
    UNUSED,
    LastReport,
    LearnedState,
    LoadState,
    Session,
    _reports,
    parse_state,
    render_state,
    render_training,
)
from specdecode_operator.state.store import DraftWrite, StateStore, draft_writes
from specdecode_operator.types import Deployment
from specdecode_worker.contract import Plan, TreeShape
from support.operators.canary import canary_with, trying
from support.operators.crowd import Crowd
from support.operators.fleet import SimulatedWorker, Truth, deployment_with, loop_over
from support.operators.loop_bench import Cluster

STATE = "demo-state"


def store_of(cluster: Cluster) -> StateStore:
    return StateStore(cluster, cluster, lambda manifest: None)


def session_with(load: float = 1, uid: str = "u1", **fields: Any) -> Session:
    return Session(learned=LearnedState(uid=uid, load=LoadState(sequences=load), **fields))


async def written(cluster: Cluster, deployment: Deployment, session: Session | None = None) -> StateStore:
    """Write a state and return the store of a new process."""
    session = session or session_with(uid=deployment.uid)
    await store_of(cluster).save(deployment, session, urgent=True, now=0)
    return store_of(cluster)


# --- writes -----------------------------------------------------------------------------------------------------------


async def test_state_is_written_for_decisions_and_once_a_minute_for_measurements() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = store_of(cluster)

    async def save(load: float, *, now: float, urgent: bool = False, learnt: bool = False) -> int:
        await store.save(deployment, session_with(load), urgent=urgent, learnt=learnt, now=now)
        return len(cluster.writes)

    assert await save(1, now=0, urgent=True) == 1
    assert await save(2, now=100) == 1, "nothing was measured"
    assert await save(3, now=30, learnt=True) == 1, "not twice a minute"
    assert await save(3, now=61) == 2, "measurements are written later, once"
    assert await save(4, now=200) == 2
    assert await save(4, now=201, urgent=True) == 3
    assert await save(4, now=202, urgent=True) == 3, "equal text is not written"


async def test_training_runs_are_written_with_each_change() -> None:
    cluster, canary = Cluster(), trying()
    store = store_of(cluster)
    for _ in range(3):
        await store.save(canary.deployment, canary.session, urgent=False, learnt=False, now=1)
    assert len(cluster.writes) == 1
    again = store_of(cluster)
    loaded = (await again.load(canary.deployment.key, canary.deployment.uid)).drafts
    assert render_training(loaded) == render_training(canary.record)
    assert loaded.candidate == "", "which is in its SpecDecodeDraft alone"
    await again.save(canary.deployment, canary.session, urgent=False, learnt=False, now=2)
    assert len(cluster.writes) == 1, "a new process writes nothing that is stored"
    asked = replace(canary.session, drafts=canary.record.model_copy(update={"request": "again"}))
    await again.save(canary.deployment, asked, urgent=False, learnt=False, now=3)
    assert '"request":"again"' in cluster.stored[STATE]["data"][TRAINING_KEY]


async def test_drafts_are_written_as_they_differ_and_what_the_server_returns_is_noted() -> None:
    cluster, canary, noted = Cluster(), canary_with(), list[Any]()
    canary.tick(push=False)
    store = StateStore(cluster, cluster, noted.append)
    writes = draft_writes(canary.deployment, canary.record, canary.observed().drafts, now=canary.now)
    assert await store.save_drafts(canary.deployment, writes, ()) is None
    assert cluster.writes == ["SpecDecodeDraft/draft-0", "SpecDecodeDraft/draft-0/status"]
    assert [("status" in one) for one in noted] == [False, True]
    assert await store.save_drafts(canary.deployment, (), canary.drafts) is None
    assert cluster.writes[2:] == ["deleted SpecDecodeDraft/draft-0 draft-0"]
    cluster.down, cluster.refusal = {"draft-0"}, Conflict("the object has been modified")
    problem = await store.save_drafts(canary.deployment, writes, ())
    assert (problem.reason, "modified" in problem.message) == ("Unavailable", True)
    cluster.refusal, present = NotFound("no such draft"), canary.drafts[0]
    changed = DraftWrite(
        present, present.model_copy(update={"spec": present.spec.model_copy(update={"role": "Retired"})})
    )
    assert await store.save_drafts(canary.deployment, [changed], ()) is None, "a deletion that the watch shows later"


async def test_a_failed_write_is_due_again() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = store_of(cluster)
    cluster.down = {STATE}
    problem = await store.save(deployment, session_with(2), urgent=False, now=100)
    assert problem.reason == "Unavailable"
    cluster.down = set()
    await store.save(deployment, session_with(2), urgent=False, learnt=False, now=101)
    assert len(cluster.writes) == 1
    assert (await store.load(deployment.key, deployment.uid)).learned.load.sequences == 2


async def test_the_config_map_is_written_through_the_applier() -> None:
    cluster, guard, deployment = Cluster(), Cluster(), deployment_with()
    store = StateStore(cluster, guard, print)
    await store.save(deployment, session_with(), urgent=True, now=0)
    assert (len(cluster.writes), len(guard.writes)) == (0, 1)


# --- reads ------------------------------------------------------------------------------------------------------------


async def test_a_new_process_reads_the_state_and_writes_nothing() -> None:
    cluster, deployment = Cluster(), deployment_with()
    loop = loop_over()
    loop.polls(8)
    restarted = await written(cluster, deployment, loop.memory)
    session = await restarted.load(deployment.key, deployment.uid)
    assert session.stored
    assert session.learned == loop.memory.learned.model_copy(update={"plan": None}), "which is in the other ConfigMap"
    await restarted.save(deployment, session, urgent=True, now=1)
    assert len(cluster.writes) == 1, "the ConfigMap has this text"


async def test_a_state_of_another_deployment_is_not_taken() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = await written(cluster, deployment, session_with(5, uid="another"))
    session = await store.load(deployment.key, deployment.uid)
    assert (session.stored, session.learned) == (False, LearnedState(uid=deployment.uid))
    foreign = trying()
    store = await written(cluster, foreign.deployment, foreign.session)
    session = await store.load(foreign.deployment.key, "another uid")
    assert (session.stored, session.drafts) == (False, UNUSED)


def packed(document: Any) -> str:
    return base64.b64encode(zlib.compress(json.dumps(document).encode())).decode()


@pytest.mark.parametrize(
    "text",
    ["", "{", "AAAA", packed([]), packed({"rows": 7}), packed({"uid": "u1", "format": 9}), packed({})[:-8], "é"],
)
async def test_a_damaged_state_is_named_in_the_log_and_drafts_stay(text: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster, canary = Cluster(), trying()
    store = await written(cluster, canary.deployment, canary.session)
    cluster.stored[STATE]["data"][STATE_KEY] = text
    with caplog.at_level(logging.WARNING):
        session = await store.load(canary.deployment.key, canary.deployment.uid)
    assert (session.stored, session.drafts.phase) == (False, "Canary")
    assert "the state was not read" in caplog.text
    assert f"{canary.deployment.namespace}/{canary.deployment.name}" in caplog.text


async def test_data_that_expands_without_end_is_not_read() -> None:
    text = base64.b64encode(zlib.compress(b" " * (learned_module.MAX_CONTENT_BYTES + 1))).decode()
    with pytest.raises(ValueError, match="too long"):
        parse_state({STATE_KEY: text}, "u1")


async def test_the_plan_is_read_from_the_config_map_that_workers_mount() -> None:
    plan = Plan(uid="u1", draft="d", version=7, initial=TreeShape.chain(3), max_depth=5)
    cluster, deployment = Cluster(), deployment_with()
    store = await written(cluster, deployment, session_with(uid=deployment.uid, plan=plan))
    assert (await store.load(deployment.key, deployment.uid)).learned.plan is None, "no worker could mount it yet"
    await cluster.apply(manifests.plan_config_map(deployment, plan), deployment.uid)
    assert (await store.load(deployment.key, deployment.uid)).learned.plan == plan
    del cluster.stored[STATE]
    lost = await store.load(deployment.key, deployment.uid)
    assert (lost.stored, lost.learned.plan) == (False, plan), "its version goes on after a loss of the state"
    foreign = manifests.plan_config_map(deployment, plan.model_copy(update={"uid": "u0"}))
    for data in (foreign["data"], {"plan.json": "{"}, {}):
        await cluster.apply({**foreign, "data": data}, deployment.uid)
        assert (await store.load(deployment.key, deployment.uid)).learned.plan is None


# --- size -------------------------------------------------------------------------------------------------------------


def test_the_worst_case_fits_and_is_read_back_as_it_was() -> None:
    learned = Crowd().learned()
    data = render_state(learned)
    assert len(data[STATE_KEY]) < learned_module.MAX_STATE_BYTES / 2
    assert parse_state(data, "u", learned.plan) == learned
    assert render_state(learned) == data


def test_parked_drafts_that_do_not_fit_are_left_out_the_least_recently_used_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learned = Crowd().learned()
    monkeypatch.setattr(learned_module, "MAX_STATE_BYTES", len(render_state(learned)[STATE_KEY]) - 1)
    stored = parse_state(render_state(learned), "u", learned.plan)
    assert stored == learned.model_copy(update={"parked": learned.parked[:-1]})


def test_reports_are_equal_after_they_left_the_cache() -> None:
    report = SimulatedWorker(Truth()).report()
    reports = [report.model_copy(update={"clock_seconds": float(number)}) for number in range(100)]
    baselines = [LastReport.of(report, "tag") for report in reports]
    assert [baseline.report for baseline in baselines] == reports
    assert baselines[-1].report is baselines[-1].report, "a decision reads it several times"
    assert baselines[0].at(7.0).report.clock_seconds == 7.0
    assert len(_reports._reports) <= 24
