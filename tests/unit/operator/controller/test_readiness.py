"""Probes of the operator: live at once, ready with full caches and all rights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import pytest

from specdecode_operator.controller import readiness as readiness_module
from specdecode_operator.controller.readiness import Readiness, missing_rights, serve_probes
from specdecode_operator.errors import NotFound, Refused
from specdecode_operator.kube import informer as informer_module
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import JOBS, PERMISSIONS, PODS
from support.background import background
from support.operators.listing_api import ListingApi

ALL = [{"apiGroups": [group], "resources": [name], "verbs": [*verbs]} for (group, name), verbs in PERMISSIONS.items()]


class Cluster(ListingApi):
    """Stand-in API server without objects, which answers the operator's review of its own permissions."""

    def __init__(self) -> None:
        super().__init__()
        self.rules: list[Mapping[str, Any]] = list(ALL)
        self.error: Exception | None = None

    async def own_rules(self, namespace: str) -> dict[str, Any]:
        assert namespace == "ns"
        return {"resourceRules": self.rules, "incomplete": False}

    async def list(self, *_: Any, **__: Any) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer_module, "MIN_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(readiness_module, "RETRY_SECONDS", 0.02)


@asynccontextmanager
async def probed(cluster: Cluster) -> AsyncIterator[Any]:
    """Run caches and probes. Yield a function that asks a path for its status and text."""
    client = cast("KubeClient", cluster)
    caches = cluster.caches()
    readiness = Readiness(client, caches, ["ns"])
    runner = await serve_probes("127.0.0.1", 0, readiness)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    rights = asyncio.create_task(readiness.run())
    async with background(caches.run()), aiohttp.ClientSession() as session:

        async def ask(path: str) -> tuple[int, str]:
            async with session.get(url + path) as answer:
                return answer.status, (await answer.text()).strip()

        try:
            yield ask
        finally:
            rights.cancel()
            await runner.cleanup()


async def until(ask: Any, wanted: tuple[int, str]) -> None:
    """Wait for an answer of /ready."""
    async with asyncio.timeout(5):
        while (answer := await ask("/ready")) != wanted:
            await asyncio.sleep(0.02)
    assert answer == wanted


async def test_a_process_is_live_before_its_caches_are_full_and_ready_then() -> None:
    cluster = Cluster()
    cluster.answers.clear()
    async with probed(cluster) as ask:
        status, text = await ask("/ready")
        assert (status, "list of Pod: no answer yet" in text) == (503, True)
        assert await ask("/healthz") == (200, "ok")
        cluster.answers.set()
        await until(ask, (200, "ok"))


async def test_a_refused_list_is_named_until_it_is_allowed() -> None:
    cluster = Cluster()
    cluster.errors[PODS] = Refused("403", "pods is forbidden")
    async with probed(cluster) as ask:
        await until(ask, (503, "list of Pod: pods is forbidden; list of JobPod: pods is forbidden"))
        cluster.errors.clear()
        await until(ask, (200, "ok"))


async def test_missing_rights_are_named_until_they_are_granted() -> None:
    cluster = Cluster()
    cluster.rules = [rule for rule in ALL if rule["resources"] != ["services"]]
    cluster.rules.append({"apiGroups": [""], "resources": ["services"], "verbs": ["get", "list", "watch", "patch"]})
    async with probed(cluster) as ask:
        await until(ask, (503, "rights in ns: create services missing; see the chart's rbac.yaml"))
        cluster.rules = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]
        await until(ask, (200, "ok"))


async def test_without_the_crd_nothing_is_ready() -> None:
    cluster = Cluster()
    cluster.error = NotFound("list sdd: the server could not find the requested resource")
    async with probed(cluster) as ask:
        await until(ask, (503, "list sdd: the server could not find the requested resource"))
        cluster.error = None
        await until(ask, (200, "ok"))


async def test_an_operator_is_ready_without_rights_for_jobs() -> None:
    """Its role may be older than itself. It serves, and trains no drafts."""
    cluster = Cluster()
    cluster.errors[JOBS] = Refused("403", "jobs is forbidden")
    cluster.rules = [rule for rule in ALL if rule["resources"] != [JOBS.plural]]
    async with probed(cluster) as ask:
        await until(ask, (200, "ok"))


def test_a_right_for_one_object_is_not_one_for_all() -> None:
    named = [{**rule, "resourceNames": ["one"]} if rule["resources"] == ["secrets"] else rule for rule in ALL]
    assert list(missing_rights(named)) == ["create secrets"]
    assert not list(missing_rights(ALL))
