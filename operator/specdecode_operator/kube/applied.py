"""What was applied last to every child, so that one which stands need not be applied again; a restart keeps it.

A child stands while the same text would be applied, and the API server's record of the fields that are ours
(metadata.managedFields) is the one that it made then: whoever changes such a field takes it from us.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdecode_operator.kube.digests import ours_digest, text_digest
from specdecode_operator.kube.kinds import APPLIED, FIELD_MANAGER, Child

if TYPE_CHECKING:
    from specdecode_operator.kube.client import KubeClient

__all__ = ["FIELD_MANAGER", "Applied", "ApplyCache", "Child", "ours_digest", "text_digest"]


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


REAPPLY_SECONDS = 60.0
"""An unchanged child is looked at again after this long."""


def note_read(cache: ApplyCache, child: Child, resource: Mapping[str, Any]) -> None:
    """Remember that an object which was just read is as it was applied."""
    known = cache.get(child)
    if known is not None and ours_digest(resource) == known.ours:
        known.at = time.monotonic()


async def apply_cached(client: KubeClient, cache: ApplyCache, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Apply a manifest unless it was applied less than a minute ago, or nobody touched our fields since.

    For callers from before ChildApplier. Returns an empty mapping where nothing was sent.
    """
    child = manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    text, known = text_digest(manifest), cache.get(child)
    if known is not None and known.text == text:
        if time.monotonic() - known.at < REAPPLY_SECONDS:
            return {}
        resource = await client.get_metadata(APPLIED[child[0]], *child[1:])
        known.at = time.monotonic() if resource else known.at
        if resource and ours_digest(resource) == known.ours:
            return {}
    answer = await client.apply(manifest, force=True)
    cache[child] = Applied(text, ours_digest(answer), time.monotonic())
    return answer
