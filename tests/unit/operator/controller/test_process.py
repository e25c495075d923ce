"""Watch events of our kind: which of them change the state table, and which start a decision."""

from __future__ import annotations

from typing import Any, cast

from specdecode_operator.controller.loops import Loops
from specdecode_operator.controller.process import Process
from specdecode_operator.settings import Settings

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
    """Loops that record the calls they get."""

    def __init__(self) -> None:
        self.changed = 0
        self.forgotten: list[str] = []

    def resource_changed(self, key: object) -> None:
        self.changed += 1

    def forget(self, key: object, uid: str) -> None:
        self.forgotten.append(uid)


def started() -> tuple[Process, Recorded]:
    process, loops = Process(Settings()), Recorded()
    process._loops = cast("Loops", loops)
    return process, loops


def test_changes_by_users_start_a_decision_and_status_updates_do_not() -> None:
    process, loops = started()
    counts = []
    for event, body in (
        (None, resource()),
        ("MODIFIED", resource(version=2)),
        ("MODIFIED", resource(version=3, **{"kubectl.kubernetes.io/restartedAt": "now"})),
        ("MODIFIED", resource(2, version=4)),
        ("ADDED", resource(version=7, uid="u2")),
    ):
        process.resource_event(event, body)
        counts.append(loops.changed)
    assert counts == [1, 1, 1, 2, 3]
    assert loops.forgotten == ["u1"]


def test_an_event_older_than_the_known_resource_is_ignored() -> None:
    process, _ = started()
    process.resource_event(None, resource(version=10))
    process.resource_event("MODIFIED", resource(version=9))
    state = process._table.get(KEY)
    assert state is not None
    assert state.resource.value["status"]["version"] == 10


def test_a_deployment_is_forgotten_after_a_deleted_event_or_a_deletion_timestamp() -> None:
    for event, deletion in (("DELETED", None), ("MODIFIED", "now")):
        process, loops = started()
        process.resource_event(None, resource())
        body = resource(version=2)
        body["metadata"]["deletionTimestamp"] = deletion
        process.resource_event(event, body)
        assert process._table.get(KEY) is None
        assert loops.forgotten == ["u1"]


def test_a_standby_follows_resources_without_deciding() -> None:
    process = Process(Settings())
    process.resource_event(None, resource())
    assert process._table.get(KEY) is not None
