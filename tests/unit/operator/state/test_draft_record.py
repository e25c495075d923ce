"""Stored rollout of drafts: the round trip, and what an unreadable ConfigMap costs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from specdecode_operator.kube.kinds import Kind
from specdecode_operator.state.compact import decode, encode
from specdecode_operator.state.draft_record import (
    UNUSED,
    CountedPair,
    DraftRecord,
    TrialRecord,
    parse_drafts,
    render_drafts,
)
from specdecode_operator.state.draft_store import DraftStore
from specdecode_operator.state.session import Session
from specdecode_operator.types import ChildProblem, Key
from support.operators.canary import CANDIDATE, NEW, OLD, trying
from support.operators.fleet import deployment_with


class Cluster:
    """A cluster with one ConfigMap, which counts what is applied."""

    def __init__(self) -> None:
        self.writes: list[Mapping[str, Any]] = []
        self.is_down = False

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> ChildProblem | None:
        if self.is_down:
            return ChildProblem("ConfigMap", "demo-drafts", "Unavailable", "no answer")
        if not self.writes or self.writes[-1] != manifest:
            self.writes.append(manifest)
        return None

    def digests(self, key: Key, names: Iterable[str]) -> dict[str, str]:
        return {}

    def recall(self, key: Key, digests: Mapping[str, str]) -> None: ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Mapping[str, Any] | None:
        assert name == "demo-drafts"
        return self.writes[-1] if self.writes else None


def full() -> DraftRecord:
    """Return the record of a deployment with a lineage and a second trial."""
    canary = trying()
    canary.finish_pairs(3, 0.1)
    canary.command("reject")
    canary.until("Cooldown")
    canary.change(draft_rollout={"candidate": {**CANDIDATE, "hash": "third0third0"}})
    canary.ticks(2)
    canary.finish_pairs(5, 0.05)
    return canary.record


def test_a_record_is_read_as_it_was_written() -> None:
    record = full()
    assert record.trial is not None
    assert record.lineage
    assert parse_drafts(render_drafts(record)) == (record, ())


def test_fields_of_a_newer_operator_are_ignored() -> None:
    record = full()
    data = render_drafts(record)
    version, lineage = decode(data["lineage"])
    newer = encode(version, {"entries": [{**entry, "novelty": {"isDefaulted": True}} for entry in lineage["entries"]]})
    assert parse_drafts({**data, "lineage": newer}) == (record, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"version": 1, "phase": "Dancing"}',
        '{"version": 1, "encoding": "zlib"}',
        "null",
    ],
)
def test_an_unreadable_life_cycle_serves_the_draft_of_the_spec(text: str) -> None:
    record, problems = parse_drafts({**render_drafts(full()), "lifecycle": text})
    assert len(problems) == 1
    assert "lifecycle" in record.problem
    assert (record.phase, record.current, record.trial) == ("Serving", "", None)
    assert [entry.hash for entry in record.lineage] == [NEW], "the other sections stay"


@pytest.mark.parametrize("section", ["trial", "lineage"])
@pytest.mark.parametrize("text", ["{", '{"version": 1}', '{"version": 1, "trial": {"id": 3}, "entries": [{}]}'])
def test_another_unreadable_section_is_left_out(section: str, text: str) -> None:
    record, problems = parse_drafts({**render_drafts(full()), section: text})
    assert len(problems) == 1
    assert record.phase == "Canary"
    assert not getattr(record, section)


def test_a_long_trial_is_stored_exactly() -> None:
    pairs = tuple(
        CountedPair(total=(index - 200) / 7000, tasks={"other": index / 3, "code": 0.0}) for index in range(500)
    )
    trial = TrialRecord(id="t", started_at=1.5, block_requests=32, max_pairs=500, min_gain=0.02, pairs=pairs)
    record = UNUSED.model_copy(update={"spec_draft": "file:///d", "trial": trial})
    data = render_drafts(record)
    assert parse_drafts(data) == (record, ())
    assert sum(map(len, data.values())) < 64 * 1024


def test_a_lost_trial_begins_again_under_another_name() -> None:
    canary = trying()
    canary.finish_pairs(3, 0.1)
    before = canary.record.trial
    data = {key: text for key, text in render_drafts(canary.record).items() if key != "trial"}
    canary.session = Session(learned=canary.session.learned, drafts=parse_drafts(data)[0])
    canary.tick()
    after = canary.record.trial
    assert before is not None
    assert after is not None
    assert (after.id, after.pairs) == (f"{NEW}-2", ())


async def test_an_unreadable_record_stays_until_another_candidate_is_taken_up() -> None:
    cluster, canary = Cluster(), trying()
    store = DraftStore(cluster, cluster)
    await store.save(canary.deployment, canary.record)
    broken = {**cluster.writes[-1], "data": {"lifecycle": '{"version": 9}', "jobs": "of a newer operator"}}
    cluster.writes.append(broken)
    store = DraftStore(cluster, cluster)
    canary.session = Session(learned=canary.session.learned, drafts=await store.load(("ns", "demo"), "u1"))
    canary.ticks(3)
    assert (canary.phase, canary.record.is_used) == ("Serving", False)
    assert await store.save(canary.deployment, canary.record) is None
    assert cluster.writes[-1] == broken
    canary.change(draft_rollout={"candidate": {**CANDIDATE, "hash": "third0third0"}})
    canary.tick()
    assert (canary.phase, canary.record.problem) == ("Canary", "")
    await store.save(canary.deployment, canary.record)
    assert cluster.writes[-1]["data"]["jobs"] == "of a newer operator"
    assert (await DraftStore(cluster, cluster).load(("ns", "demo"), "u1")) == canary.record


async def test_nothing_is_written_without_a_candidate() -> None:
    cluster = Cluster()
    store = DraftStore(cluster, cluster)
    assert await store.load(("ns", "demo"), "u1") == UNUSED
    await store.save(deployment_with(), UNUSED)
    assert cluster.writes == []


async def test_a_record_is_written_when_it_changes_and_once_only() -> None:
    cluster, canary = Cluster(), trying()
    store = DraftStore(cluster, cluster)
    cluster.is_down = True
    problem = await store.save(canary.deployment, canary.record)
    assert problem is not None
    cluster.is_down = False
    for _ in range(3):
        await store.save(canary.deployment, canary.record)
    assert len(cluster.writes) == 1
    again = DraftStore(cluster, cluster)
    assert await again.load(("ns", "demo"), "u1") == canary.record
    cluster.writes.append({})
    await again.save(canary.deployment, canary.record)
    assert cluster.writes[-1] == {}, "a new process writes nothing that is stored"


async def test_the_record_of_another_deployment_is_not_read() -> None:
    cluster, canary = Cluster(), trying()
    await DraftStore(cluster, cluster).save(canary.deployment, canary.record)
    assert await DraftStore(cluster, cluster).load(("ns", "demo"), "u2") == UNUSED


def test_a_short_record_can_be_read_by_a_person() -> None:
    document = json.loads(render_drafts(trying().record)["lifecycle"])
    assert (document["phase"], document["candidate"], document["spec_hash"]) == ("Canary", NEW, OLD)
