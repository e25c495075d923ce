"""What was applied last to every child, so that one which stands need not be applied again; a restart keeps it.

A child stands while the same text would be applied, and the API server's record of the fields that are ours
(metadata.managedFields) is the one that it made then: whoever changes such a field takes it from us.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FIELD_MANAGER = "specdecode"

Child = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(slots=True)
class Applied:
    """What was applied last to one object."""

    text: str
    """Digest of the manifest."""
    ours: str
    """Digest of the record of the fields that are ours, as the API server keeps it."""
    at: float
    """When that was seen last; before all times for what an operator before this one wrote down."""


class ApplyCache:
    """By child. ``told`` and ``recall`` carry it over a restart."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[str, Applied]] = {}
        """By namespace and name, then by kind: thousands of children, of which one deployment's are asked for."""

    def __setitem__(self, child: Child, applied: Applied) -> None:
        kind, namespace, name = child
        self._known.setdefault((namespace, name), {})[kind] = applied

    def get(self, child: Child) -> Applied | None:
        kind, namespace, name = child
        return self._known.get((namespace, name), {}).get(kind)

    def forget(self, namespace: str, name: str) -> None:
        self._known.pop((namespace, name), None)

    def told(self, namespace: str, names: Iterable[str]) -> dict[str, str]:
        """As text, for those in ``namespace`` with these names: who comes next may ``recall`` it."""
        return {
            f"{kind}/{name}": f"{applied.text} {applied.ours}"
            for name in names
            for kind, applied in sorted(self._known.get((namespace, name), {}).items())
        }

    def recall(self, namespace: str, told: Mapping[str, str]) -> None:
        """What is known already is newer. What does not read is left out: then the child is applied, no more."""
        for child, digests in told.items():
            kind, _, name = child.partition("/")
            text, _, ours = digests.partition(" ")
            if name and ours and self.get((kind, namespace, name)) is None:
                self[kind, namespace, name] = Applied(text, ours, float("-inf"))


def text_digest(document: object) -> str:
    """Of a manifest, or of what else is written as JSON."""
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=12).hexdigest()


def ours_digest(found: Mapping[str, Any]) -> str:
    """Of what the API server says that we own of an object."""
    entries = found["metadata"].get("managedFields", [])
    mine = [
        entry
        for entry in entries
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and "subresource" not in entry
    ]
    return text_digest(mine)
