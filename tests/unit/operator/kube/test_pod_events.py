"""Events of pods that do not start."""

from __future__ import annotations

from typing import Any

from specdecode_operator.controller.children import mount_problem


class Events:
    """Fake client with a list of events."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = events

    async def list(self, *_: Any, fields: str) -> dict[str, Any]:
        assert fields == "involvedObject.uid=u,type=Warning"
        return {"items": list(self.events)}


def event(reason: str, message: str, **times: Any) -> dict[str, Any]:
    return {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "reason": reason, "message": message, **times}


async def problem_of(*events: dict[str, Any]) -> str | None:
    client: Any = Events(*events)
    return await mount_problem(client, "ns", "u")


async def test_the_latest_problem_is_returned() -> None:
    first = event("FailedMount", "first", lastTimestamp="2026-01-01T00:01:00Z")
    later = event("FailedCreatePodSandBox", "later", lastTimestamp=None, eventTime="2026-01-01T00:02:00.000000Z")
    series = event("FailedAttachVolume", "latest", series={"lastObservedTime": "2026-01-01T00:03:00.000000Z"})
    assert await problem_of(first, event("FailedMount", "old")) == "FailedMount: first"
    assert await problem_of(later, first) == "FailedCreatePodSandBox: later"
    assert await problem_of(later, series, first) == "FailedAttachVolume: latest"


async def test_other_warnings_are_no_problem_of_mounts() -> None:
    assert await problem_of(event("BackOff", "restarting")) is None
    assert await problem_of() is None
