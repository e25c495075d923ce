"""Digests by which a child that needs no apply is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from specdecode_operator.kube.kinds import FIELD_MANAGER


def text_digest(document: object) -> str:
    """Return a digest of a document that can be written as JSON. The order of keys does not matter."""
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=12).hexdigest()


def ours_digest(resource: Mapping[str, Any]) -> str:
    """Return a digest of the API server's record of the fields that the operator applied to an object.

    Another client that changes such a field takes it out of this record, so the digest changes with every drift.
    """
    entries = resource["metadata"].get("managedFields") or []
    ours = [
        entry
        for entry in entries
        if entry.get("manager") == FIELD_MANAGER and entry.get("operation") == "Apply" and "subresource" not in entry
    ]
    return text_digest(ours)
