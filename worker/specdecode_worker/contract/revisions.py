"""Commits of models whose URI names no commit, so that every pod of a deployment serves the same weights.

`pull` writes them as the termination message of its container, which the operator reads. The operator mounts them into
new pods, whose `pull` then fetches the same commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from specdecode_worker.contract.wire import Received

Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?$")]
"""Full hash of a git commit, SHA-1 or SHA-256."""
MAX_REVISIONS = 16
"""Most models of one pod: the target and its drafts."""


class Revisions(Received):
    """Commits by the URI of their model."""

    kind: Literal["specdecode-revisions"] = "specdecode-revisions"
    revisions: Mapping[str, Commit] = Field(default={}, max_length=MAX_REVISIONS)
