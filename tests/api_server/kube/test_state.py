"""State on a real API server: sections are written, read, migrated and preserved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.kube.client import CONFIG_MAPS, KubeClient
from specdecode_operator.manifests import state_config_map
from specdecode_operator.state.learned import LearnedState, LoadState
from specdecode_operator.state.store import StateStore
from specdecode_operator.types import ChildProblem, Deployment, Key
from support.operators.crowd import Crowd
from support.operators.fleet import deployment_with


class Unowned:
    """Writer without owner references: the garbage collector would delete children of an owner that does not exist."""

    def __init__(self, api: KubeClient) -> None:
        self.api = api

    async def apply(self, manifest: Any, owner_uid: str) -> ChildProblem | None:
        metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
        await self.api.apply({**manifest, "metadata": metadata}, force=True)
        return None

    def digests(self, key: Key, names: Iterable[str]) -> dict[str, str]:
        return {}

    def recall(self, key: Key, digests: Mapping[str, str]) -> None:
        """Forget the digests: nothing else is applied here."""


@pytest.fixture
def deployment(namespace: str) -> Deployment:
    return replace(deployment_with(), namespace=namespace)


async def data_of(api: KubeClient, deployment: Deployment) -> dict[str, str]:
    config_map = await api.get(CONFIG_MAPS, deployment.namespace, f"{deployment.name}-state")
    assert config_map is not None
    return dict(config_map["data"])


async def test_the_worst_case_is_accepted_and_read_back(api: KubeClient, deployment: Deployment) -> None:
    learned = Crowd().learned().model_copy(update={"uid": deployment.uid})
    store = StateStore(api, Unowned(api))
    await store.save(deployment, learned, urgent=True, now=0)
    session = await StateStore(api, Unowned(api)).load(deployment.key, deployment.uid)
    assert session.learned.rows == learned.rows
    assert [parked.draft for parked in session.learned.parked] == [parked.draft for parked in learned.parked]


async def test_old_keys_go_and_sections_of_a_newer_operator_stay(api: KubeClient, deployment: Deployment) -> None:
    old = LearnedState(uid=deployment.uid, load=LoadState(sequences=7), format=1)
    data = {"memory.json": old.model_dump_json(by_alias=True), "template.json": "", "cache": '{"version":1}'}
    await Unowned(api).apply(state_config_map(deployment, data), deployment.uid)
    store = StateStore(api, Unowned(api))
    session = await store.load(deployment.key, deployment.uid)
    assert session.learned.load.sequences == 7
    await store.save(deployment, session.learned, urgent=True, now=0)
    written = await data_of(api, deployment)
    assert "memory.json" not in written
    assert written["cache"] == '{"version":1}'
    assert {"meta", "plan", "estimates", "applied"} <= written.keys()
