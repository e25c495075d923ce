"""Store of sessions: when the ConfigMap is written, and what a new process reads from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from specdecode_operator.kube.kinds import Kind
from specdecode_operator.state import learned as learned_module
from specdecode_operator.state.learned import LearnedState, LoadState, StepTimeCell
from specdecode_operator.state.session import Session
from specdecode_operator.state.store import StateStore
from specdecode_operator.types import ChildProblem, Deployment, Key
from support.operators.fleet import deployment_with, loop_over


class Cluster:
    """A cluster with one ConfigMap, which counts what is applied."""

    def __init__(self) -> None:
        self.recalled: dict[str, str] = {}
        self.writes: list[Mapping[str, Any]] = []
        self.is_down = False

    @property
    def data(self) -> dict[str, str]:
        data: dict[str, str] = self.writes[-1]["data"]
        return data

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> ChildProblem | None:
        if self.is_down:
            return ChildProblem("ConfigMap", "n-state", "Unavailable", "no answer")
        self.writes.append(manifest)
        return None

    def digests(self, key: Key, names: Iterable[str]) -> dict[str, str]:
        return self.recalled

    def recall(self, key: Key, digests: Mapping[str, str]) -> None:
        self.recalled = {child: text for child, text in digests.items() if "/" in child}

    async def get(self, kind: Kind, namespace: str, name: str) -> Mapping[str, Any] | None:
        return self.writes[-1] if self.writes else None


def session_with(load: float = 1, uid: str = "u1", **fields: Any) -> Session:
    return Session(learned=LearnedState(uid=uid, load=LoadState(sequences=load), **fields))


async def written(cluster: Cluster, deployment: Deployment, session: Session | None = None) -> StateStore:
    """Write a state and return the store of a new process."""
    session = session or session_with(uid=deployment.uid)
    await StateStore(cluster, cluster).save(deployment, session.learned, urgent=True, now=0)
    return StateStore(cluster, cluster)


async def test_state_is_written_for_decisions_and_once_a_minute_for_measurements() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = StateStore(cluster, cluster)

    async def save(load: float, *, now: float, urgent: bool = False, learnt: bool = False) -> int:
        await store.save(deployment, session_with(load).learned, urgent=urgent, learnt=learnt, now=now)
        return len(cluster.writes)

    assert await save(1, now=0, urgent=True) == 1
    assert await save(2, now=100) == 1, "nothing was measured"
    assert await save(3, now=30, learnt=True) == 1, "not twice a minute"
    assert await save(3, now=61) == 2, "measurements are written later, once"
    assert await save(4, now=200) == 2
    assert await save(4, now=201, urgent=True) == 3
    assert await save(4, now=202, urgent=True) == 3, "equal text is not written"


async def test_a_failed_write_is_due_again() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = StateStore(cluster, cluster)
    cluster.is_down = True
    problem = await store.save(deployment, session_with(2).learned, urgent=False, now=100)
    assert problem is not None
    assert problem.reason == "Unavailable"
    cluster.is_down = False
    await store.save(deployment, session_with(2).learned, urgent=False, learnt=False, now=101)
    assert len(cluster.writes) == 1
    assert (await store.load(deployment.key, deployment.uid)).learned.load.sequences == 2


async def test_the_config_map_is_written_through_the_applier() -> None:
    cluster, guard, deployment = Cluster(), Cluster(), deployment_with()
    store = StateStore(cluster, guard)
    await store.save(deployment, session_with().learned, urgent=True, now=0)
    assert (len(cluster.writes), len(guard.writes)) == (0, 1)


async def test_a_new_process_reads_the_state_and_writes_nothing() -> None:
    cluster, deployment = Cluster(), deployment_with()
    loop = loop_over()
    loop.polls(8)
    restarted = await written(cluster, deployment, loop.memory)
    session = await restarted.load(deployment.key, deployment.uid)
    assert session.stored
    assert session.learned.rows == loop.memory.learned.rows
    await restarted.save(deployment, session.learned, urgent=True, now=1)
    assert len(cluster.writes) == 1, "the ConfigMap has this text"


async def test_a_new_process_recalls_what_was_applied() -> None:
    cluster, deployment = Cluster(), deployment_with()
    cluster.recalled = {f"Service/{deployment.name}": "text ours"}
    restarted = await written(cluster, deployment)
    cluster.recalled = {}
    await restarted.load(deployment.key, deployment.uid)
    assert cluster.recalled == {f"Service/{deployment.name}": "text ours"}


@pytest.mark.parametrize(
    "text", ["", "7", "[]", '{"version":1,"children":[]}', '{"version":1,"children":{"Service/x":3,"x":"a b"}}']
)
async def test_garbage_of_what_was_applied_is_nothing_applied(text: str) -> None:
    cluster, deployment = Cluster(), deployment_with()
    restarted = await written(cluster, deployment)
    cluster.data["applied"] = text
    assert (await restarted.load(deployment.key, deployment.uid)).stored
    assert cluster.recalled == {}


async def test_the_format_before_sections_is_read_once_and_replaced() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = await written(cluster, deployment)
    data = cluster.data
    learned = LearnedState(uid=deployment.uid, draft="d1", load=LoadState(sequences=7), format=1)
    data.clear()
    data["memory.json"], data["template.json"] = learned.model_dump_json(by_alias=True), ""
    data["applied.json"] = json.dumps({f"Service/{deployment.name}": "text ours"})
    session = await store.load(deployment.key, deployment.uid)
    assert (session.stored, session.learned.load.sequences) == (True, 7)
    assert cluster.recalled == {f"Service/{deployment.name}": "text ours"}
    await store.save(deployment, session.learned, urgent=False, learnt=False, now=100)
    assert len(cluster.writes) == 1, "an upgrade alone writes nothing"
    await store.save(deployment, session.learned, urgent=False, now=100)
    assert not {"memory.json", "template.json", "applied.json"} & cluster.data.keys()
    assert (await StateStore(cluster, cluster).load(deployment.key, deployment.uid)).learned == session.learned


async def test_sections_of_a_newer_operator_survive_a_downgrade() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = await written(cluster, deployment)
    cluster.data["cache"] = newer = '{"version":3,"prefixes":["a"]}'
    session = await store.load(deployment.key, deployment.uid)
    await store.save(deployment, session.learned, urgent=True, now=1)
    assert len(cluster.writes) == 1, "they are no reason to write"
    await store.save(deployment, session_with(9).learned, urgent=True, now=2)
    await store.save(deployment, session_with(10).learned, urgent=True, now=3)
    assert cluster.data["cache"] == newer
    assert "10" in cluster.data["estimates"]


async def test_a_damaged_section_is_named_in_the_log_and_the_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = await written(cluster, deployment, session_with(5, pin="none"))
    cluster.data["plan"] = "{"
    with caplog.at_level(logging.WARNING):
        session = await store.load(deployment.key, deployment.uid)
    assert (session.learned.load.sequences, session.learned.pin, session.stored) == (5, "", True)
    assert "section plan" in caplog.text
    assert f"{deployment.namespace}/{deployment.name}" in caplog.text


async def test_what_does_not_fit_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, deployment = Cluster(), deployment_with()
    monkeypatch.setattr(learned_module, "MAX_STATE_BYTES", 700)
    cell = StepTimeCell(tokens_bucket=1, draft_passes=0, prefill=False, context_bucket=0, values=(1.5,) * 37, at=1)
    costs = tuple(cell.model_copy(update={"context_bucket": index}) for index in range(8))
    with caplog.at_level(logging.WARNING):
        await StateStore(cluster, cluster).save(deployment, session_with(costs=costs).learned, urgent=True, now=0)
    assert "left out" in caplog.text
    assert "step times of the current draft" in json.loads(cluster.data["meta"])["dropped"]


async def test_a_state_of_another_deployment_is_not_taken() -> None:
    cluster, deployment = Cluster(), deployment_with()
    store = await written(cluster, deployment, session_with(5, uid="another"))
    session = await store.load(deployment.key, deployment.uid)
    assert (session.stored, session.learned) == (False, LearnedState(uid=deployment.uid))


async def test_a_deployment_without_state_is_new() -> None:
    session = await StateStore(Cluster(), Cluster()).load(("ns", "n"), "u1")
    assert not session.stored
