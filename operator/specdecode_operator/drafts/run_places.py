"""Places of training runs and of their drafts on the claim of ``distillation.storage``. Pure."""

from __future__ import annotations

from specdecode_worker.contract import Artifact


def published_prefix(claim: str, deployment: str) -> str:
    """Return the URI below which a deployment's new drafts lie, each in a folder with its hash as the name."""
    return f"pvc://{claim}/drafts/{deployment}"


def run_folder(deployment: str, run: str) -> str:
    """Return the folder of a run's checkpoints and data, relative to the claim."""
    return f"distillation/{deployment}/{run}"


def problem_of_draft(draft: Artifact | None, prefix: str) -> str:
    """Return why workers must not take a Job's draft; empty if they may."""
    if draft is None:
        return "the verdict is better and names no draft"
    if draft.uri != f"{prefix}/{draft.hash}":
        return f"the verdict names the draft {draft.uri}, which is not {prefix}/{draft.hash}"
    return ""
