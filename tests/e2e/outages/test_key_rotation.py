"""Rotation of an API key and of the master key of admin tokens under traffic (``make proofs P=outages``)."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from specdecode_operator.controller.admin_tokens import KEY_SECRET, derive_token
from specdecode_operator.manifests.objects import tokens_name
from specdecode_worker.contract import Port, Route
from support.e2e.endpoint import MODEL
from support.e2e.kube import Namespace
from support.e2e.release import Release
from support.e2e.routed import Routed, routed_deployment
from support.e2e.streams import StreamTraffic, failures
from support.kube import wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.proof("outages")]
SECRET, ENTRY = "rotated-keys", "team-a"
OLD, NEW = "first-key-of-team-a", "second-key-of-team-a"
MOUNT_SECONDS = 180
"""Longest time until the kubelet has updated a mounted Secret and its reader has seen it."""


@pytest.fixture
def guarded(watched: Namespace) -> Iterator[Routed]:
    """Yield a deployment whose clients need a key."""
    write_keys(watched, OLD)
    with routed_deployment(watched, "guarded", api_key=OLD, apiKeysSecretRef={"name": SECRET}) as routed:
        yield routed
    watched.kubectl("delete", "secret", SECRET)


def write_keys(namespace: Namespace, *keys: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}}
    namespace.kubectl("apply", "--filename", "-", stdin=json.dumps({**secret, "stringData": {ENTRY: "\n".join(keys)}}))


def is_admitted(url: str, key: str) -> bool:
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=10, trust_env=False)
    assert answer.status_code in (200, 401), answer.text
    return answer.status_code == 200


def test_key_rotation_refuses_no_request(guarded: Routed, watched: Namespace) -> None:
    """Both keys are valid for a while, in which clients change to the new one."""
    endpoint = guarded.endpoint
    with ExitStack() as stack:
        pods = [*endpoint.ready_pods(), *endpoint.ready_pods("router")]
        urls = [stack.enter_context(watched.reach("pod", pod, Port.http)) for pod in pods]
        assert not any(is_admitted(url, NEW) for url in urls)
        traffics = [stack.enter_context(StreamTraffic(url, MODEL, 4, OLD)) for url in (guarded.url, urls[0])]
        began = time.monotonic()
        write_keys(watched, OLD, NEW)
        wait_for("the new key", lambda: all(is_admitted(url, NEW) for url in urls), timeout_s=MOUNT_SECONDS)
        both = time.monotonic() - began
        for traffic in traffics:
            traffic.api_key = NEW
            changed = traffic.count()
            wait_for("clients with the new key", lambda t=traffic, c=changed: t.count() > c + 8, timeout_s=120)  # type: ignore[misc]
        write_keys(watched, NEW)
        began = time.monotonic()
        wait_for("the old key is gone", lambda: not any(is_admitted(u, OLD) for u in urls), timeout_s=MOUNT_SECONDS)
        gone = time.monotonic() - began
        ended = [traffic.count() for traffic in traffics]
        wait_for("traffic goes on", lambda: all(t.count() > e + 4 for t, e in zip(traffics, ended, strict=True)))
    for place, traffic in zip(("through routers", "at a worker"), traffics, strict=True):
        broken = failures(traffic.answers, guarded.expected)
        print(f"\nkey rotation {place}: {len(traffic.answers)} answers, {len(broken)} broken")
        assert broken == []
    print(f"new key valid everywhere after {both:.0f} s, old key refused everywhere after {gone:.0f} s")


def test_rotation_of_the_master_key_fails_no_request(watched: Namespace, release: Release) -> None:
    """The procedure of docs/how-to/secure.md: both keys are valid until workers have read the tokens of the new one."""
    name, home = "rekeyed", release.namespace
    first: str = home.get("secret", KEY_SECRET)["data"]["current"]
    second = base64.b64encode(b"another key of the operator").decode()
    with routed_deployment(watched, name) as routed, ExitStack() as stack:
        urls = [stack.enter_context(watched.reach("pod", pod, Port.admin)) for pod in routed.endpoint.ready_pods()]

        def accept(key: str) -> set[bool]:
            token = derive_token(base64.b64decode(key), (watched.name, name), "operator")
            headers = {"Authorization": f"Bearer {token}"}
            answers = [httpx.get(f"{url}{Route.report}", headers=headers, timeout=10, trust_env=False) for url in urls]
            return {answer.status_code == 200 for answer in answers}

        def replace_keys(**keys: str | None) -> None:
            patch: dict[str, Any] = {"data": keys}
            home.kubectl("patch", "secret", KEY_SECRET, "--type", "merge", "--patch", json.dumps(patch))
            with release.stopped():
                watched.kubectl("delete", "secret", tokens_name(name))
            find = ("get", "secret", tokens_name(name), "--ignore-not-found", "--output", "name")
            wait_for("the Secret is there again", lambda: watched.kubectl(*find), timeout_s=60)

        with routed.unbroken_traffic("rotation of the master key"):
            replace_keys(current=second, previous=first)
            wait_for("the new key is valid", lambda: accept(second) == {True}, timeout_s=MOUNT_SECONDS)
            assert accept(first) == {True}
            replace_keys(previous=None)
            wait_for("the old key is not", lambda: accept(first) == {False}, timeout_s=MOUNT_SECONDS)
            assert accept(second) == {True}
        routed.endpoint.wait_condition("ReportsFresh", "True")
