"""The operator's process: its settings, a start that fails, and which watch events change state or start a decision."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from specdecode_operator.__main__ import main
from specdecode_operator.controller.process import Fleet, Process
from specdecode_operator.errors import NotFound, SettingsError
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.settings import Settings, read_settings
from support.operators.listing_api import ListingApi

KEY = ("ns", "a")


def resource(generation: int = 1, version: int = 1, uid: str = "u1", **annotations: str) -> dict[str, Any]:
    metadata = {
        "namespace": "ns",
        "name": "a",
        "uid": uid,
        "generation": generation,
        "resourceVersion": str(version),
        "annotations": annotations,
    }
    return {"metadata": metadata, "spec": {}, "status": {"version": version}}


class Recorded:
    """A fleet that records the calls it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, key: object) -> None:
        self.calls.append("start")

    def wake(self, key: object, *, changed: bool) -> None:
        assert changed
        self.calls.append("wake")

    def forget(self, key: object, uid: str) -> None:
        self.calls.append(f"forget {uid}")


def started() -> tuple[Process, Recorded]:
    process, fleet = Process(Settings()), Recorded()
    process.fleet = cast("Fleet", fleet)
    return process, fleet


def test_changes_by_users_wake_the_loop_and_status_updates_do_not() -> None:
    process, fleet = started()
    for event, body in (
        (None, resource()),
        ("MODIFIED", resource(version=2)),
        ("MODIFIED", resource(version=3, **{"kubectl.kubernetes.io/restartedAt": "now"})),
        ("MODIFIED", resource(2, version=4)),
        ("ADDED", resource(version=7, uid="u2")),
    ):
        process.resource_event(event, body)
    assert fleet.calls == ["start", "wake", "forget u1", "start"]


def test_an_event_older_than_the_known_resource_is_ignored() -> None:
    process, _ = started()
    process.resource_event(None, resource(version=10))
    process.resource_event("MODIFIED", resource(version=9))
    assert process.resources[KEY]["status"]["version"] == 10


def test_a_deployment_is_forgotten_after_a_deleted_event_or_a_deletion_timestamp() -> None:
    for event, deletion in (("DELETED", None), ("MODIFIED", "now")):
        process, fleet = started()
        process.resource_event(None, resource())
        body = resource(version=2)
        body["metadata"]["deletionTimestamp"] = deletion
        process.resource_event(event, body)
        assert KEY not in process.resources
        assert fleet.calls == ["start", "forget u1"]


def test_a_standby_follows_resources_without_deciding() -> None:
    process = Process(Settings())
    process.resource_event(None, resource())
    assert KEY in process.resources


def test_the_record_of_field_owners_is_not_stored() -> None:
    process, _ = started()
    body = resource()
    body["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    process.resource_event(None, body)
    assert "managedFields" not in process.resources[KEY]["metadata"]


class WithoutKind(ListingApi):
    """API server without the CRD, whose other lists do not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers.clear()
        self.is_closed = False

    async def own_rules(self, namespace: str) -> dict[str, Any]:
        return {}

    async def list(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise NotFound("list sdd: the server could not find the requested resource")

    async def close(self) -> None:
        self.is_closed = True


async def test_a_stop_before_the_crd_is_there_ends_all_that_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """kopf runs no cleanup after a start that it cancelled."""
    api = WithoutKind()

    async def connect(**_: Any) -> WithoutKind:
        return api

    monkeypatch.setattr(KubeClient, "connect", connect)
    settings = Settings(listen_address="127.0.0.1").model_copy(update={"port_health": 0})
    starting = asyncio.create_task(Process(settings).start())
    await asyncio.sleep(0.05)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled(), "it waits for the CRD"
    assert api.is_closed


def test_settings_have_defaults() -> None:
    assert read_settings({"PATH": "/bin", "SPECDECODE_OPERATOR_LOG_LEVEL": ""}).poll_seconds == 5
    assert read_settings({"SPECDECODE_OPERATOR_WATCH_NAMESPACES": "a, b,"}).watch_namespaces == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [("POLL_SECONDS", "often"), ("PORT_HEALTH", "0"), ("LOG_LEVEL", "loud"), ("WORKER_IMAGE_PULL_POLICY", "Maybe")],
)
def test_an_invalid_setting_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"SPECDECODE_OPERATOR_{name}='{value}'"):
        read_settings({f"SPECDECODE_OPERATOR_{name}": value})


def test_the_process_exits_with_2_on_an_invalid_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDECODE_OPERATOR_POLL_SECONDS", "-1")
    assert main(["run"]) == 2
    assert "SPECDECODE_OPERATOR_POLL_SECONDS" in capsys.readouterr().err
