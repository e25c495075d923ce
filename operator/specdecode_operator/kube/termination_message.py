"""What a container left in its termination message: a worker's verdict on its own memory and draft, or plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from specdecode_worker.contract import CheckVerdict

CONTAINER = "worker"


def verdict_of(pod_status: Mapping[str, Any]) -> CheckVerdict | None:
    """Of the worker that ended last; None when it left none. What stands there was written by a pod, so it may be
    anything."""
    for container in pod_status.get("containerStatuses") or []:
        if container.get("name") == CONTAINER:
            return next((found for message in _messages(container) if (found := _read(message))), None)
    return None


def last_words(message: str) -> str:
    """In one line: what a verdict complains of, else the last line of a log."""
    verdict = _read(message)
    if verdict:
        return (verdict.problem if not verdict.fits else verdict.draft_problem or "").strip()
    return message.strip().rsplit("\n", 1)[-1]


def _messages(container: Mapping[str, Any]) -> Iterator[str]:
    for when in ("state", "lastState"):
        ended = (container.get(when) or {}).get("terminated") or {}
        if ended.get("message"):
            yield str(ended["message"])


def _read(message: str) -> CheckVerdict | None:
    if not message.startswith("{"):
        return None
    try:
        return CheckVerdict.model_validate_json(message)
    except ValidationError:
        return None
