"""Rules on whose an object is: which objects the operator may apply to, and why not to others."""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import KIND
from specdecode_operator.kube.children import ChildRecord, controller_of
from specdecode_operator.types import ChildProblem, Manifest


def obstacle(record: ChildRecord, manifest: Manifest, owner_uid: str) -> ChildProblem | None:
    """Return why a manifest must not be applied to the object that has its name. None if it may be.

    Args:
        record: The object.
        manifest: Child of a SpecDecodeDeployment, with its owner reference.
        owner_uid: Uid of that SpecDecodeDeployment.
    """
    deployment = (controller_of(manifest["metadata"]) or {}).get("name", "")
    what = f'{record.kind} "{record.name}"'
    if record.deleting:
        return ChildProblem(record.kind, record.name, "Unavailable", f"{what} is still being deleted")
    if record.controller_uid == owner_uid:
        return None
    if (record.controller_kind, record.controller_name) == (KIND, deployment):
        message = f"{what} of a deleted {KIND} of the same name is still being deleted"
        return ChildProblem(record.kind, record.name, "Unavailable", message)
    if is_orphan(record) and record.deployment == deployment:
        return None
    owner = (
        "has no controller"
        if record.controller_uid is None
        else f'is controlled by {record.controller_kind} "{record.controller_name}"'
    )
    message = (
        f"{what} exists already and {owner}, so it is not changed; "
        f'rename the {KIND} "{deployment}", or delete the {record.kind}'
    )
    return ChildProblem(record.kind, record.name, "NotOwned", message)


def is_orphan(record: ChildRecord) -> bool:
    """Return whether the object was a child of a deployment that was deleted without its children."""
    return record.controller_uid is None and record.labelled
