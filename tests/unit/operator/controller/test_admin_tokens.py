"""Derived admin tokens: their independence, rotation, and when a Secret is created again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from specdecode_operator.controller.admin_tokens import AdminTokens, TokenKeys, derive_token, load_keys
from specdecode_operator.errors import ClusterError, Conflict, Refused
from specdecode_operator.kube.client import KubeClient
from support.clock import Clock
from support.operators.fleet import deployment_with

A, B = ("ns", "a"), ("ns", "b")


class Secrets:
    """Secrets of an API server that allows `create` alone in users' namespaces."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        self.stored: dict[str, Any] | None = None
        self.error: Exception | None = None

    async def create(self, kind: object, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        self.created.append(manifest)
        return {**manifest, "data": {"current": "a2V5"}}

    async def get(self, kind: object, namespace: str, name: str) -> dict[str, Any] | None:
        return self.stored


def test_tokens_differ_by_key_deployment_and_scope() -> None:
    tokens = {
        derive_token(key, uid, scope) for key in (b"1", b"2") for uid in (A, B) for scope in ("operator", "router")
    }
    assert len(tokens) == 8
    assert all(len(token) == 43 for token in tokens)
    assert derive_token(b"1", A, "operator") == derive_token(b"1", A, "operator")


async def test_a_secret_is_created_once_and_again_only_on_suspicion() -> None:
    api, clock, deployment = Secrets(), Clock(), deployment_with()
    tokens = AdminTokens(cast("KubeClient", api), TokenKeys(b"key"), clock)
    await tokens.ensure(deployment, suspicious=False)
    await tokens.ensure(deployment, suspicious=False)
    await tokens.ensure(deployment, suspicious=True)
    assert len(api.created) == 1, "within ten seconds nothing is tried again"
    clock.now = 11
    await tokens.ensure(deployment, suspicious=False)
    assert len(api.created) == 1, "a deployment at rest writes nothing"
    await tokens.ensure(deployment, suspicious=True)
    clock.now = 30
    tokens.suspect(deployment.uid)
    await tokens.ensure(deployment, suspicious=False)
    assert len(api.created) == 3
    await tokens.ensure(replace(deployment, uid="another"), suspicious=False)
    assert len(api.created) == 4
    assert api.created[0] == api.created[2], "the same tokens are written again"


async def test_a_rotation_writes_the_secret_at_each_restart_although_all_pods_run() -> None:
    api, deployment = Secrets(), deployment_with()
    for keys in (TokenKeys(b"new", b"old"), TokenKeys(b"new")):
        tokens = AdminTokens(cast("KubeClient", api), keys, Clock())
        for _ in range(2):
            await tokens.ensure(deployment, suspicious=False, mounted=True)
    new, old = (derive_token(key, deployment.key, "router") for key in (b"new", b"old"))
    assert [manifest["stringData"]["router"].split() for manifest in api.created] == [[new, old], [new]]


async def test_a_full_quota_is_no_problem_while_pods_have_mounted_the_secret() -> None:
    """The API server checks the quota first, and only then that the Secret exists."""
    api, clock, deployment = Secrets(), Clock(), deployment_with()
    tokens = AdminTokens(cast("KubeClient", api), TokenKeys(b"key"), clock)
    api.error = Refused("exceeded quota")
    await tokens.ensure(deployment, suspicious=False, mounted=True)
    clock.now = 11
    with pytest.raises(Refused, match="quota"):
        await tokens.ensure(deployment, suspicious=True)


async def test_a_refused_secret_is_reported_and_tried_again() -> None:
    api, deployment = Secrets(), deployment_with()
    tokens = AdminTokens(cast("KubeClient", api), TokenKeys(b"key"), Clock())
    api.error = Refused("exceeded quota")
    with pytest.raises(Refused, match="quota"):
        await tokens.ensure(deployment, suspicious=False)
    api.error = Conflict("it exists")
    await tokens.ensure(deployment, suspicious=False)
    api.error = Refused("not asked for again")
    await tokens.ensure(deployment, suspicious=False)


async def test_the_key_is_read_or_created() -> None:
    api = Secrets()
    assert (await load_keys(cast("KubeClient", api), "home")).current == b"key"
    api.stored = {"data": {"current": "bmV3", "previous": "b2xk"}}
    assert await load_keys(cast("KubeClient", api), "home") == TokenKeys(b"new", b"old")
    api.stored = {"data": {"other": "bmV3"}}
    with pytest.raises(ClusterError, match="has no key 'current'"):
        await load_keys(cast("KubeClient", api), "home")
