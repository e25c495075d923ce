"""Plans of the operator on the embedded model: a merged draft is dropped in the middle of an answer, same text."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.decision.decide import decide
from specdecode_operator.state.learned import MergeChoice
from specdecode_operator.state.session import Session
from specdecode_operator.types import Defaults, Deployment, Observation, Worker
from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import LocalEngine
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, NamedDraft, Plan, WorkerConfig
from specdecode_worker.core.messages import Sampling, Submit
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.server.service import PlanStore, parse_plan

pytestmark = [pytest.mark.embedded]

TASK = "edits"
CODE = "def add(items):\n    total = 0\n    for item in items:\n        total += item.price\n    return total\n"
SPECULATION: dict[str, Any] = {
    "method": "eagle3",
    "draft": {"uri": EMBEDDED_DRAFT},
    "drafts": [{"name": "lookup", "method": "ngram"}],
    "tasks": [{"name": TASK, "merge": [{"draft": "lookup", "depth": 6}]}],
}


@pytest.fixture(scope="module")
def local() -> LocalEngine:
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="embedded", dtype="float32", max_model_len=512),
        draft=DraftConfig(method="eagle3", uri=EMBEDDED_DRAFT, required=True),
        drafts=(NamedDraft(name="lookup", method="ngram"),),
        engine=EngineConfig(max_num_seqs=2, device="cpu", threads=1, kv_cache_tokens=2048),
    )
    return LocalEngine(config, default_cache_dir())


def planned(local: LocalEngine, session: Session, now: float) -> tuple[Plan, Session]:
    """Return the operator's plan for the engine's present report, as a worker takes it from ``PUT /v1/plan``.

    Guard and exploration are off and the worker's clock is ``now``, because all three depend on the machine's speed.
    """
    spec = {"model": {"uri": EMBEDDED_TARGET}, "speculation": SPECULATION, "engine": {"maxNumSeqs": 2}}
    deployment = Deployment(
        namespace="ns", name="demo", uid="u", generation=1, spec=Spec.model_validate(spec), status=Status()
    )
    report = local.engine.report().model_copy(update={"clock_seconds": now})
    pod = Worker(name="p", uid="p", address="10.0.0.1", ready=True, report=report)
    observed = Observation(workload=None, workers=(pod,), session=session)
    defaults = Defaults(worker_image="localhost/worker:1", worker_image_pull_policy="IfNotPresent")
    decision, after = decide(deployment, observed, defaults, now=now)
    plan = parse_plan(decision.plan.model_dump_json().encode())
    return plan.model_copy(update={"guard": False, "explore": 0.0}), after


def test_a_merged_draft_is_dropped_in_the_middle_of_an_answer(local: LocalEngine) -> None:
    texts = []
    for drops in (False, True):
        store, session = PlanStore("u", Plan(uid="u")), Session()
        local.engine.set_plan(Plan(version=1))
        if drops:
            plan, session = planned(local, session, 100)
            store.check(plan)
            local.engine.set_plan(plan)
            assert [one.draft for one in plan.tasks[0].merge] == ["lookup"]
        prompt = local.tokenizer.chat([{"role": "user", "content": f"Repeat this code:\n{CODE}"}])
        sampling = Sampling(max_tokens=28, seed=1, temperature=0.0)
        local.engine.add(Submit(request_id=f"{drops}", prompt=tuple(prompt), sampling=sampling, task=TASK))
        text: list[int] = []
        while not local.engine.idle:
            text += [token for new in local.engine.step() for token in new.tokens]
            if drops and len(text) > 10 and plan.tasks[0].merge:
                learned = session.learned
                (choice,) = learned.merges
                dropped = MergeChoice(**{**dict(choice), "drafts": (), "since": 105.0})
                session = Session(
                    learned=learned.model_copy(update={"merges": (dropped,)}), baselines=session.baselines
                )
                plan, session = planned(local, session, 110)
                store.check(plan)
                local.engine.set_plan(plan)
                assert plan.tasks[0].merge == ()
                assert {cell.task for cell in session.learned.credit} == {TASK}
        texts.append(text)
    assert texts[0] == texts[1]
    hashes = {local.engine.draft.hash, *(draft.hash for draft in local.engine.report().named_drafts)}
    assert {cell.draft for cell in local.engine.report().credit} == hashes
