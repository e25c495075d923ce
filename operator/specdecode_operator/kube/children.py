"""Records of children: what an informer stores of an object to tell whether it needs an apply, and whose it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_operator.kube.digests import ours_digest
from specdecode_operator.kube.kinds import Child, Kind
from specdecode_operator.kube.object_store import NAME_LABEL


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRecord:
    """Metadata of one child, as the API server has it."""

    kind: str
    namespace: str
    name: str
    uid: str
    controller_uid: str | None = None
    """Uid of the controlling owner. None if the object has none."""
    controller_kind: str = ""
    controller_name: str = ""
    ours_digest: str = ""
    """Digest of the record of the fields that the operator applied."""
    deployment: str = ""
    """Value of the label specdecode.io/name, empty without the label."""
    deleting: bool = False
    """The object has a deletion timestamp."""

    @property
    def labelled(self) -> bool:
        """True if the object has the label with the name of a deployment."""
        return bool(self.deployment)

    @property
    def child(self) -> Child:
        return self.kind, self.namespace, self.name


def project_child(kind: Kind) -> Callable[[Mapping[str, Any]], ChildRecord]:
    """Return the function that makes a ChildRecord of an object of this kind; the object's metadata suffices."""

    def project(resource: Mapping[str, Any]) -> ChildRecord:
        metadata = resource["metadata"]
        controller = controller_of(metadata) or {}
        return ChildRecord(
            kind=kind.kind,
            namespace=sys.intern(metadata["namespace"]),
            name=metadata["name"],
            uid=metadata["uid"],
            controller_uid=controller.get("uid"),
            controller_kind=sys.intern(controller.get("kind", "")),
            controller_name=controller.get("name", ""),
            ours_digest=ours_digest(resource),
            deployment=(metadata.get("labels") or {}).get(NAME_LABEL, ""),
            deleting="deletionTimestamp" in metadata,
        )

    return project


def controller_of(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference of the object's controller, or None."""
    owners = metadata.get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)
