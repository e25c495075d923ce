"""Client of the API server: errors, deadlines, the guard before writes, evictions, and an older CRD."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.aio.client import ApiException

from specdecode_operator.errors import (
    ClusterError,
    Conflict,
    EvictionBlocked,
    Gone,
    NotFound,
    NotLeader,
    Refused,
    Unavailable,
)
from specdecode_operator.kube.client import (
    REMEMBER_SECONDS,
    DeclaredFields,
    KubeClient,
    environment_proxy,
    keepalive_socket,
    translate,
    watch_error,
)
from specdecode_operator.kube.kinds import CONFIG_MAPS, LEASES
from support.clock import Clock
from support.operators.kube_objects import config_map
from support.tiers import skip_reason


def answer(status: int, message: str = "no", **details: Any) -> ApiException:
    body = json.dumps({"kind": "Status", "code": status, "message": message, "details": details})
    return ApiException(status=status, reason="Reason", body=body)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Refused),
        (403, Refused),
        (422, Refused),
        (404, NotFound),
        (409, Conflict),
        (410, Gone),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
        (504, Unavailable),
    ],
)
def test_status_codes_become_error_classes(status: int, error: type[ClusterError]) -> None:
    translated = translate(answer(status, "the reason"), "get /x")
    assert type(translated) is error
    assert str(translated) == "get /x: the reason"
    assert translated.sentence == "the reason"


def test_only_a_disruption_budget_blocks_an_eviction() -> None:
    cause = {"reason": "DisruptionBudget", "message": "The disruption budget b needs 1 healthy pods and has 1"}
    blocked = translate(answer(429, "Cannot evict pod.", causes=[cause]), "post /x")
    assert type(blocked) is EvictionBlocked
    assert blocked.sentence == f"Cannot evict pod. {cause['message']}"
    assert type(translate(ApiException(status=429, reason="Too Many", body="wait"), "post /x")) is Unavailable


@pytest.mark.parametrize("body", [None, "", "plain text", "[]", '"text"', "{}"])
def test_answers_without_status_are_translated(body: str | None) -> None:
    assert str(translate(ApiException(status=502, reason="Bad Gateway", body=body), "get /x")) == (
        "get /x: 502 Bad Gateway"
    )


def test_an_error_event_of_an_expired_version_is_gone() -> None:
    assert type(watch_error({"code": 410, "message": "too old"}, "watch /x")) is Gone
    assert type(watch_error({"code": 500}, "watch /x")) is Unavailable


def refuse() -> None:
    raise NotLeader("not the leader")


class Recorder:
    """Fake of the dynamic client that records the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, float]] = []

    async def request(self, method: str, path: str, *, _request_timeout: Any, **_: Any) -> Any:
        self.requests.append((method, _request_timeout.total))
        return self

    async def json(self) -> dict[str, Any]:
        return {"metadata": {}}


@pytest.fixture
async def recorded() -> tuple[KubeClient, Recorder]:
    client, recorder = KubeClient(SimpleNamespace(configuration=None)), Recorder()
    client._client = recorder
    return client, recorder


MANIFEST = config_map("ns", "a")
WRITES: list[Callable[[KubeClient], Any]] = [
    lambda client: client.create(CONFIG_MAPS, MANIFEST),
    lambda client: client.update(CONFIG_MAPS, MANIFEST),
    lambda client: client.delete(CONFIG_MAPS, "ns", "a"),
    lambda client: client.apply(MANIFEST, force=True),
    lambda client: client.apply_status("ns", "a", {}),
    lambda client: client.evict("ns", "a", "uid"),
]


@pytest.mark.parametrize("write", WRITES)
async def test_every_write_passes_the_guard(
    recorded: tuple[KubeClient, Recorder], write: Callable[[KubeClient], Any]
) -> None:
    client, recorder = recorded
    await write(client)
    client.guard = lambda: 3.0
    await write(client)
    assert [seconds for _, seconds in recorder.requests] == [10, 3.0], "a write ends before leadership does"
    client.guard = refuse
    with pytest.raises(NotLeader):
        await write(client)
    assert len(recorder.requests) == 2, "nothing was sent"


async def test_a_deletion_names_the_object_and_takes_what_it_owns() -> None:
    """Pods of a Job would stay by default, and another Job may have the name meanwhile."""
    bodies: list[Any] = []

    class Deletions(Recorder):
        async def request(self, method: str, path: str, *, _request_timeout: Any, **more: Any) -> Any:
            bodies.append(more["body"])
            return await super().request(method, path, _request_timeout=_request_timeout)

    client = KubeClient(SimpleNamespace(configuration=None))
    client._client = Deletions()
    await client.delete(CONFIG_MAPS, "ns", "a", uid="u1")
    await client.delete(CONFIG_MAPS, "ns", "a")
    background = {"propagationPolicy": "Background"}
    assert bodies == [{**background, "preconditions": {"uid": "u1"}}, background]


async def test_reads_and_leases_pass_without_the_guard(recorded: tuple[KubeClient, Recorder]) -> None:
    client, recorder = recorded
    client.guard = refuse
    await client.get(CONFIG_MAPS, "ns", "a")
    await client.list(CONFIG_MAPS, "ns")
    await client.create(LEASES, MANIFEST, guarded=False)
    await client.update(LEASES, MANIFEST, guarded=False)
    assert [method for method, _ in recorder.requests] == ["get", "get", "post", "put"]


# --- connections ----------------------------------------------------------------------------------------------------


def test_environment_proxy_is_used_except_for_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "10.0.0.1,.svc")
    assert environment_proxy("https://10.0.0.1:6443") is None
    assert environment_proxy("https://kubernetes.default.svc") is None
    assert environment_proxy("https://api.example.org") == "http://proxy:3128"
    monkeypatch.delenv("https_proxy")
    assert environment_proxy("https://api.example.org") is None


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason=skip_reason("linux", "the system has no option for it"))
def test_sockets_notice_a_dead_peer_within_twenty_seconds() -> None:
    with keepalive_socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", 1))) as made:
        idle, interval, probes = (
            made.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + interval * probes <= 20
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 20_000


# --- status of a CRD that is older than the operator ------------------------------------------------------------------

STATUS = {
    "replicas": 1,
    "later": 2,
    "model": {"uri": "x", "newer": 1},
    "tasks": [{"name": "a", "odd": 1}, {"name": "b", "odd": 2}],
    "conditions": [{"type": "Ready", "odd": 1}],
}
FIRST = """failed to create typed patch object (ns/a; specdecode.io/v1alpha1, Kind=SpecDecodeDeployment): errors:
  .status.tasks[0].odd: field not declared in schema
  .status.conditions[type="Ready"].odd: field not declared in schema"""
SECOND = """failed to create typed patch object (ns/a; specdecode.io/v1alpha1, Kind=SpecDecodeDeployment): errors:
  .status.model.newer: field not declared in schema
  .status.later: field not declared in schema"""
ONE = "failed to create typed patch object (ns/a; x/v1, Kind=S): .status.later: field not declared in schema"
DECLARED = {
    "replicas": 1,
    "model": {"uri": "x"},
    "tasks": [{"name": "a"}, {"name": "b"}],
    "conditions": [{"type": "Ready"}],
}


def test_fields_that_the_api_server_names_are_left_out_for_a_while() -> None:
    clock = Clock()
    fields = DeclaredFields(clock)
    assert fields.declared(STATUS) == STATUS
    assert fields.note_refusal(FIRST)
    assert fields.note_refusal(SECOND)
    assert fields.declared(STATUS) == DECLARED
    assert not fields.note_refusal(FIRST), "the same refusal again is not repaired"
    clock.now = REMEMBER_SECONDS
    assert fields.declared(STATUS) == STATUS, "the CRD may have been upgraded"


def test_a_single_field_is_named_in_the_same_line() -> None:
    fields = DeclaredFields()
    assert fields.note_refusal(ONE)
    assert fields.declared({"later": 1, "replicas": 1}) == {"replicas": 1}


class OldServer(KubeClient):
    """API server whose CRD lacks fields."""

    def __init__(self, *refusals: str) -> None:
        self.status_fields = DeclaredFields()
        self.refusals = list(refusals)
        self.written: list[Any] = []

    async def _apply(self, path: str, body: Any, *, force: bool) -> dict[str, Any]:
        self.written.append(body["status"])
        if self.refusals:
            raise Unavailable(f"patch {path}", self.refusals.pop(0))
        return dict(body)


async def test_a_status_is_written_without_the_fields_that_an_older_crd_lacks() -> None:
    server = OldServer(FIRST, SECOND)
    assert (await server.apply_status("ns", "a", STATUS))["status"] == DECLARED
    assert len(server.written) == 3
    await server.apply_status("ns", "a", STATUS)
    assert server.written[3:] == [DECLARED], "later writes do not try the fields again"


@pytest.mark.parametrize("refusals", [("etcd is down",), (ONE, ONE)])
async def test_other_refusals_are_raised(refusals: tuple[str, ...]) -> None:
    with pytest.raises(Unavailable):
        await OldServer(*refusals).apply_status("ns", "a", STATUS)
