"""Places of training runs and of their drafts on the claim of ``distillation.storage``. Pure."""

from __future__ import annotations

import re

from specdecode_worker.contract import Artifact

_HASH = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*")
"""Form of a draft's hash. It is the name of one folder, so it has no slash and does not begin with a dot."""


def published_prefix(place: str, deployment: str) -> str:
    """Return the URI below which a deployment's new drafts lie, each in a folder with its hash as the name.

    Args:
        place: URI of the claim or of the place in a bucket.
        deployment: Name of the deployment.
    """
    return f"{place}/drafts/{deployment}"


def run_folder(deployment: str, run: str) -> str:
    """Return the folder of a run's checkpoints and data, relative to the claim."""
    return f"distillation/{deployment}/{run}"


def deletion_id(run: str) -> str:
    """Return the id of the Job that deletes a run's folder, in its label."""
    return f"{run}-delete"


def published_hash(uri: str, prefix: str) -> str:
    """Return the hash in the URI of a published draft; empty for other URIs."""
    place, _, name = uri.rstrip("/").rpartition("/")
    return name if place == prefix and _HASH.fullmatch(name) else ""


def problem_of_draft(draft: Artifact | None, prefix: str) -> str:
    """Return why workers must not take a Job's draft; empty if they may."""
    if draft is None:
        return "the verdict is better and names no draft"
    if not _HASH.fullmatch(draft.hash):
        return f"the verdict names a draft with the hash {draft.hash!r}, which is none"
    if draft.uri != f"{prefix}/{draft.hash}":
        return f"the verdict names the draft {draft.uri}, which is not {prefix}/{draft.hash}"
    return ""
