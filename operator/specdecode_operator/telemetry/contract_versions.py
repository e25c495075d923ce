"""Contract versions of workers: which ones the operator reads, and what to do about the others. Pure."""

from __future__ import annotations

from specdecode_worker.contract import CONTRACT_VERSION, SUPPORTED_CONTRACT_VERSIONS


def version_problem(version: int, supported: range = SUPPORTED_CONTRACT_VERSIONS) -> str | None:
    """Return why reports of this contract version cannot be read, and what helps. Return None if they can."""
    if version in supported:
        return None
    versions = f"this operator's {supported.start}..{supported.stop - 1}"
    if version >= supported.stop:
        return f"contract {version} is newer than {versions}: upgrade the operator"
    # A restart alone is not enough: with updatePolicy OnSpecChange the pods would start from the same image again.
    return (
        f"contract {version} is older than {versions}: roll out newer workers "
        "(set spec.workers.image, or spec.workers.updatePolicy: Automatic)"
    )


def newer_note(version: int) -> str:
    """Return a note for an invalid report of a newer worker, which may use values that this operator cannot know."""
    if version <= CONTRACT_VERSION:
        return ""
    return f" (contract {version}, this operator writes {CONTRACT_VERSION}; upgrade the operator)"
