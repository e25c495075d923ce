"""Termination messages of containers: the verdict of a worker on its memory and draft, or the end of a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from specdecode_worker.contract import CheckVerdict

CONTAINER = "worker"
"""Container whose termination message may have a verdict."""


def verdict_of(pod_status: Mapping[str, Any]) -> CheckVerdict | None:
    """Return the verdict of a pod's worker container that ended, or None if its message is not a verdict.

    A pod can write any text as its termination message, so the text is validated.
    """
    for container in pod_status.get("containerStatuses") or []:
        if container.get("name") == CONTAINER:
            return next((verdict for message in _messages(container) if (verdict := _read(message))), None)
    return None


def last_words(message: str) -> str:
    """Return why a container ended, in one line: the problem of a verdict, or else the last line of the message."""
    verdict = _read(message)
    if verdict:
        return (verdict.problem if not verdict.fits else verdict.draft_problem or "").strip()
    return message.strip().rsplit("\n", 1)[-1]


def _messages(container: Mapping[str, Any]) -> Iterator[str]:
    """Yield the messages of the present and the previous termination."""
    for when in ("state", "lastState"):
        ended = (container.get(when) or {}).get("terminated") or {}
        if ended.get("message"):
            yield str(ended["message"])


def _read(message: str) -> CheckVerdict | None:
    """Parse a verdict. Return None if the message is none."""
    if not message.startswith("{"):
        return None
    try:
        return CheckVerdict.model_validate_json(message)
    except ValidationError:
        return None
