"""State between two looks: packed readings, and when it is written to the cluster."""

from __future__ import annotations

from typing import Any, cast

import pytest
from fleet import deployment_with
from socket_workers import good_report

from specdecode_operator.kube.applied import Applied, ApplyCache
from specdecode_operator.kube.client import Kind, KubeClient
from specdecode_operator.state.learned import LearnedState, LoadState
from specdecode_operator.state.session import Baseline, Session
from specdecode_operator.state.store import StateStore
from specdecode_worker.contract import Report


def test_a_packed_reading_is_what_it_was_but_for_its_clock() -> None:
    report = Report.model_validate(good_report())
    known = Baseline.of(report, '"t"')
    assert known.report == report
    assert known.at(99.0).report == report.model_copy(update={"clock_seconds": 99.0})
    assert len(known.packed) < len(report.model_dump_json()) / 2


class Written:
    """A cluster that only counts what is applied, and gives the last of it back."""

    def __init__(self) -> None:
        self.states: list[dict[str, str]] = []
        self.applied = ApplyCache()

    async def apply(self, manifest: Any) -> None:
        self.states.append(dict(manifest["data"]))

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        return {"data": self.states[-1]}


async def test_memory_is_written_for_decisions_and_for_what_was_learnt_alone() -> None:
    cluster, deployment = Written(), deployment_with()
    store = StateStore(cast("KubeClient", cluster))

    async def save(load: float, *, now: float, urgent: bool = False, learnt: bool = False) -> int:
        learned = LearnedState(uid="u1", load=LoadState(sequences=load))
        await store.save(deployment, Session(learned=learned), urgent=urgent, learnt=learnt, now=now)
        return len(cluster.states)

    assert await save(1, now=0, urgent=True) == 1
    assert await save(2, now=100) == 1, "nothing was measured: what moved is the clock's doing"
    assert await save(3, now=30, learnt=True) == 1, "not twice a minute"
    assert await save(3, now=61) == 2, "what was learnt is written at rest, once"
    assert await save(4, now=200) == 2
    assert await save(4, now=201, urgent=True) == 3


async def test_a_restart_knows_what_was_written_and_what_was_applied() -> None:
    cluster, deployment = Written(), deployment_with()
    child = ("Service", deployment.namespace, deployment.name)
    cluster.applied[child] = Applied("text", "ours", 5.0)
    memory = Session(learned=LearnedState(uid=deployment.uid, load=LoadState(sequences=1)))
    await StateStore(cast("KubeClient", cluster)).save(deployment, memory, urgent=True, now=0)
    cluster.applied = ApplyCache()
    restarted = StateStore(cast("KubeClient", cluster))
    found = await restarted.load(deployment)
    recalled = cluster.applied.get(child)
    assert recalled is not None
    assert (recalled.text, recalled.ours) == ("text", "ours")
    await restarted.save(deployment, found, urgent=True, now=1)
    assert len(cluster.states) == 1, "it stands there already"


@pytest.mark.parametrize("told", ["", "7", "[]", '{"Service": "a b"}', '{"Service/x": 3}', '{"Service/x": "a"}'])
async def test_garbage_of_what_was_applied_is_nothing_applied(told: str) -> None:
    cluster, deployment = Written(), deployment_with()
    memory = Session(learned=LearnedState(uid=deployment.uid))
    await StateStore(cast("KubeClient", cluster)).save(deployment, memory, urgent=True, now=0)
    cluster.states[-1]["applied.json"] = told
    assert (await StateStore(cast("KubeClient", cluster)).load(deployment)).found
    assert cluster.applied.told(deployment.namespace, ["x"]) == {}
