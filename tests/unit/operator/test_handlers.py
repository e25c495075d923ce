"""Which events of a deployment ask for a look."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.v1alpha1 import PAUSED_ANNOTATION, PIN_ANNOTATION
from specdecode_operator.controller.handlers import Process
from specdecode_operator.settings import Settings

KEY = ("ns", "a")


def metadata(generation: int = 1, **annotations: str) -> dict[str, Any]:
    return {"uid": "u1", "generation": generation, "annotations": annotations}


def test_what_people_say_asks_for_a_look_and_what_we_wrote_does_not() -> None:
    process = Process(Settings())
    asked = []
    for event, found in (
        (None, metadata()),
        ("MODIFIED", metadata()),
        ("MODIFIED", metadata(**{"kubectl.kubernetes.io/restartedAt": "now"})),
        ("MODIFIED", metadata(2)),
        ("MODIFIED", metadata(2, **{PIN_ANNOTATION: "chain:2"})),
        ("MODIFIED", metadata(2, **{PAUSED_ANNOTATION: "true"})),
        ("MODIFIED", {**metadata(2, **{PAUSED_ANNOTATION: "true"}), "deletionTimestamp": "now"}),
        ("DELETED", metadata(2)),
        ("ADDED", {**metadata(), "uid": "u2"}),
    ):
        process.early.clear()
        process.event(KEY, event, found)
        asked.append(bool(process.early))
    assert asked == [True, False, False, True, True, True, True, True, True]
