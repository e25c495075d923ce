"""The lineage.json of a distilled draft: target, parent, data, settings and results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdecode_worker.contract import Method
from specdecode_worker.training.distillation.records import Summary
from specdecode_worker.training.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Target or parent draft: the URI that the user gave, its folder and the hash of its weights."""

    uri: str
    folder: Path
    hash: str


def distillation_lineage(
    *,
    target: Ancestor,
    parent: Ancestor,
    method: Method,
    draft: str,
    summary: Summary,
    golden_sha256: str | None,
    settings: dict[str, Any],
    results: dict[str, Any],
) -> dict[str, Any]:
    """Return the content of lineage.json. ``draft`` is the hash of the candidate's weights."""
    begin, end = (datetime.fromtimestamp(t, UTC).isoformat(timespec="seconds") for t in summary.window_seconds)
    return {
        "method": method,
        "made_by": "distill",
        "target": {"uri": target.uri, "hash": target.hash},
        "draft": draft,
        "parent": {"uri": parent.uri, "hash": parent.hash},
        "generation": read_lineage(parent.folder).get("generation", 0) + 1,
        "data": {
            "window": [begin, end],
            "hash": summary.sha256,
            "records": summary.records,
            "used": summary.used,
            "dropped": summary.dropped,
            "mix": summary.mix,
        },
        "golden": {"sha256": golden_sha256} if golden_sha256 else {},
        "settings": settings,
        "results": results,
    }


def read_lineage(folder: Path) -> dict[str, Any]:
    """Return the lineage of the draft in ``folder``, empty if it has none.

    Raises:
        TrainingError: The file is not valid JSON.
    """
    path = folder / "lineage.json"
    if not path.exists():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise TrainingError(f"{path} is no JSON: {error}") from None
    return document
