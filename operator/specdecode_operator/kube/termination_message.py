"""Termination messages of containers: the verdict of a worker on its memory and draft, or the end of a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from specdecode_worker.contract import CheckVerdict, Revisions

CONTAINER = "worker"
"""Container whose termination message may have a verdict."""
PULL_CONTAINER = "pull"
"""Init container whose termination message may have the commits of unpinned models."""


def verdict_of(pod_status: Mapping[str, Any]) -> CheckVerdict | None:
    """Return the verdict of a pod's worker container that ended, or None if its message is not a verdict.

    A pod can write any text as its termination message, so the text is validated.
    """
    for container in pod_status.get("containerStatuses") or []:
        if container.get("name") == CONTAINER:
            return next((verdict for message in _messages(container) if (verdict := _read(message))), None)
    return None


def revisions_of(pod_status: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the commits of the models that a pod's `pull` fetched, by URI. They are validated, as a verdict is."""
    return _read_revisions(str(pull_of(pod_status).get("message") or ""))


def pull_of(pod_status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the termination of a pod's `pull`; empty until it has ended well."""
    for container in pod_status.get("initContainerStatuses") or []:
        ended: Mapping[str, Any] = (container.get("state") or {}).get("terminated") or {}
        if container.get("name") == PULL_CONTAINER and ended.get("exitCode") == 0:
            return ended
    return {}


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


def _read_revisions(message: str) -> Mapping[str, str]:
    """Parse the commits that `pull` reported. Return none if the message is something else."""
    if not message.startswith("{"):
        return {}
    try:
        revisions = Revisions.model_validate_json(message).revisions
    except ValidationError:
        return {}
    return {sys.intern(uri): sys.intern(commit) for uri, commit in revisions.items()}
