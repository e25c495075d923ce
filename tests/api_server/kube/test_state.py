"""State and drafts on a real API server: what is written is accepted and read back, also after a restore."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import CONFIG_MAPS, DRAFTS
from specdecode_operator.state.learned import Session, parse_state
from specdecode_operator.state.store import StateStore, draft_writes, manifest_of
from specdecode_operator.types import ChildProblem, Deployment
from support.kube import Cluster, KubectlError
from support.operators.canary import NEW, Canary, trying
from support.operators.crowd import Crowd
from support.operators.fleet import deployment_with
from support.operators.kube_objects import without_owner
from support.operators.operator_process import install_crd


class Unowned:
    """Writer without owner references."""

    def __init__(self, api: KubeClient) -> None:
        self.api = api

    async def apply(self, manifest: Any, owner_uid: str) -> ChildProblem | None:
        await self.api.apply(without_owner(manifest), force=True)
        return None


@pytest.fixture
def deployment(namespace: str) -> Deployment:
    return replace(deployment_with(), namespace=namespace)


async def test_the_worst_case_is_accepted_and_read_back(api: KubeClient, deployment: Deployment) -> None:
    learned = Crowd().learned().model_copy(update={"uid": deployment.uid})
    store = StateStore(api, Unowned(api), lambda manifest: None)
    problem = await store.save(deployment, Session(learned=learned), urgent=True, now=0)
    assert problem is None
    config_map = await api.get(CONFIG_MAPS, deployment.namespace, f"{deployment.name}-state")
    assert parse_state(config_map["data"], deployment.uid, learned.plan) == learned


@pytest.fixture(scope="module")
def drafts(cluster: Cluster) -> Cluster:
    """Return the cluster with the CRDs of this tree."""
    install_crd(cluster)
    return cluster


async def stored(api: KubeClient, canary: Canary) -> None:
    """Write the drafts of a canary as the operator does, and take what the API server returned."""
    namespace = canary.deployment.namespace
    read = [await api.get(DRAFTS, namespace, one.name) for one in canary.drafts]
    stored = [SpecDecodeDraft.model_validate(one) for one in read]
    returned = {one.name: one for one in stored}

    def note(manifest: Any) -> None:
        draft = SpecDecodeDraft.model_validate(manifest)
        returned[draft.name] = draft

    store = StateStore(api, Unowned(api), note)
    writes = draft_writes(canary.deployment, canary.record, stored, now=canary.now)
    problem = await store.save_drafts(canary.deployment, writes, ())
    assert problem is None
    canary.drafts = list(returned.values())


async def test_a_trial_is_read_back_and_a_restored_draft_serves_again(
    api: KubeClient, deployment: Deployment, drafts: Cluster
) -> None:
    namespace = deployment.namespace
    canary = trying()
    canary.deployment = replace(canary.deployment, namespace=namespace)
    offered = manifest_of(canary.drafts[0])
    offered["metadata"] = {"name": "week-47", "namespace": namespace}
    canary.drafts = [SpecDecodeDraft.model_validate(await api.create(DRAFTS, offered))]
    canary.finish_pairs(4, 0.1)
    await stored(api, canary)
    read = await api.get(DRAFTS, namespace, "week-47")
    assert read is not None
    trial = SpecDecodeDraft.model_validate(read).status.trial
    assert trial == canary.record.trial, "floats too"
    canary.finish_pairs(60, 0.1)
    canary.until("Cooldown")
    await stored(api, canary)
    backup = drafts.kubectl("get", "sddr", "week-47", "--output", "yaml", namespace=namespace)
    drafts.kubectl("delete", "sddr", "week-47", namespace=namespace)
    drafts.kubectl("apply", "--filename", "-", namespace=namespace, stdin=backup)
    restored = await api.get(DRAFTS, namespace, "week-47")
    assert restored is not None
    assert "status" not in restored
    new = Canary(canary.deployment, now=canary.now)
    new.drafts = [SpecDecodeDraft.model_validate(restored)]
    new.until("Cooldown")
    assert (new.record.current, [pod.draft for pod in new.pods]) == (NEW, [NEW, NEW])


def draft(name: str, **fields: str) -> dict[str, Any]:
    spec = {"deploymentRef": {"name": "demo"}, "uri": "pvc://drafts/new", **fields}
    document = {"apiVersion": "specdecode.io/v1alpha1", "kind": "SpecDecodeDraft", "metadata": {"name": name}}
    return {**document, "spec": spec}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"uri": "pvc://drafts/other"}, "uri cannot change"),
        ({"deploymentRef": {"name": "other"}}, "deploymentRef cannot change"),
        ({"hash": "0000"}, "hash cannot change"),
        ({"hash": None}, "hash cannot change"),
        ({"role": "Boss"}, "role"),
    ],
    ids=str,
)
def test_a_draft_is_one_artifact(drafts: Cluster, namespace: str, change: dict[str, Any], words: str) -> None:
    drafts.apply(draft("one", hash="4f1c9a7b"), namespace=namespace)
    patch = json.dumps({"spec": change})
    with pytest.raises(KubectlError, match=words):
        drafts.kubectl("patch", "sddr", "one", "--type=merge", "--patch", patch, namespace=namespace)


def test_a_draft_without_a_hash_cannot_serve(drafts: Cluster, namespace: str) -> None:
    with pytest.raises(KubectlError, match="role Serving needs the hash"):
        drafts.apply(draft("two", role="Serving"), namespace=namespace)
