"""State on a real API server: the worst case is accepted, and read back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import CONFIG_MAPS
from specdecode_operator.state.learned import parse_state
from specdecode_operator.state.session import Session
from specdecode_operator.state.store import StateStore
from specdecode_operator.types import ChildProblem, Deployment
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


@pytest.fixture
def deployment(namespace: str) -> Deployment:
    return replace(deployment_with(), namespace=namespace)


async def test_the_worst_case_is_accepted_and_read_back(api: KubeClient, deployment: Deployment) -> None:
    learned = Crowd().learned().model_copy(update={"uid": deployment.uid})
    store = StateStore(api, Unowned(api))
    problem = await store.save(deployment, Session(learned=learned), urgent=True, now=0)
    assert problem is None
    config_map = await api.get(CONFIG_MAPS, deployment.namespace, f"{deployment.name}-state")
    assert config_map is not None
    assert parse_state(config_map["data"], deployment.uid) == learned
