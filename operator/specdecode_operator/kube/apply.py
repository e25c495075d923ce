"""Apply of children: only where something differs, never to objects of others, and with back-off after a refusal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_operator.api.v1alpha1 import KIND, NAME_LABEL
from specdecode_operator.errors import ClusterError, Conflict, Refused
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import APPLIED, FIELD_MANAGER, HAND_OVER_MANAGER, WORKLOADS, Child, Kind
from specdecode_operator.times import back_off
from specdecode_operator.types import ChildProblem, Key, Manifest

log = logging.getLogger(__name__)

# Digests by which a child that needs no apply is recognised.


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


# Records of children: what an informer stores of an object to tell whether it needs an apply, and whose it is.


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


# Rules on whose an object is: which objects the operator may apply to, and why not to others.


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


# Apply of children: only where something differs, never to objects of others, and with back-off after a refusal.

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
"""Pause before a failed apply is repeated; it doubles from failure to failure."""
FREE_REPAIRS = 2
"""Repairs of one child without a pause. The pauses of further ones double, so that another controller which changes the
same fields again and again causes one apply a minute."""
SETTLED_SECONDS = 120.0
"""Time without an apply after which earlier repairs no longer count."""
CACHE_LAG_SECONDS = 3.0
"""Time after an apply within which an informer that still has the state from before it is not believed."""


@dataclass(slots=True)
class LastApply:
    """Last successful apply of a child."""

    text: str
    """Digest of the manifest."""
    ours: str
    """Digest of the API server's record of the applied fields, after that apply."""
    at: float
    """Time of that apply."""
    before: ChildRecord | None
    """The informer's record when the manifest was sent."""
    confirmed: bool = False
    """The informer has shown the result."""
    drifted: bool = False
    """The informer has shown something else since then."""
    repairs: int = 0
    """Number of applies of the same manifest before this one."""

    @property
    def repair_at(self) -> float:
        """Earliest time at which the same manifest may be applied again."""
        return self.at + (_pause(self.repairs - FREE_REPAIRS + 1) if self.repairs >= FREE_REPAIRS else 0.0)


@dataclass(frozen=True, slots=True)
class FailedApply:
    """Failure of the latest attempt to apply a child."""

    text: str
    """Digest of the manifest."""
    state: tuple[object, ...]
    """State of the object at that time; if it changes, the apply is repeated at once."""
    attempts: int
    retry_at: float
    problem: ChildProblem


class ChildApplier:
    """Apply of all children of all deployments."""

    def __init__(
        self,
        client: KubeClient,
        records: Callable[[Child], ChildRecord | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare an applier.

        Args:
            client: Client of the API server.
            records: Function that returns an informer's record of a child, or None if the informer has none.
            clock: Monotonic clock, in seconds.
        """
        self._client = client
        self._records = records
        self._clock = clock
        self._applied: dict[Child, LastApply] = {}
        self._failed: dict[Child, FailedApply] = {}

    async def apply(self, manifest: Manifest, owner_uid: str) -> ChildProblem | None:
        """Make the child equal to a manifest. Return the problem that prevents it, or None.

        At rest this neither reads nor writes. A child that was changed or deleted by others is repaired as soon as the
        informer has seen it. An object that belongs to another owner is never written.

        Args:
            manifest: Child of a SpecDecodeDeployment, with its owner reference.
            owner_uid: Uid of that SpecDecodeDeployment.

        Raises:
            NotLeader: This process may not write.
        """
        child = child_of(manifest)
        record, text = self._records(child), text_digest(manifest)
        if self._is_up_to_date(child, text, record):
            self._failed.pop(child, None)
            return None
        failed = self._failed.get(child)
        state = _state(record)
        if failed and (failed.text, failed.state) == (text, state) and self._clock() < failed.retry_at:
            return failed.problem
        problem = await self._attempt(child, manifest, owner_uid, record, text)
        if problem is None:
            self._failed.pop(child, None)
        else:
            self._note_failure(child, text, state, problem)
        return problem

    def is_settled(self, key: Key, names: Iterable[str]) -> bool:
        """Return whether the informers show every applied child as it was applied last, so that no apply is due.

        Args:
            key: Key of the deployment.
            names: Names of its children.
        """
        children = [(kind, key[0], name) for name in names for kind in APPLIED]
        if any(child in self._failed for child in children):
            return False
        applied = [(self._applied[child], self._records(child)) for child in children if child in self._applied]
        return all(self._shows(last, record) for last, record in applied)

    def forget(self, namespace: str, name: str) -> None:
        """Forget the children with this name, when their deployment is gone."""
        for kind in APPLIED:
            self._applied.pop((kind, namespace, name), None)
            self._failed.pop((kind, namespace, name), None)

    def is_confirmed(self, manifests: Iterable[Manifest]) -> bool:
        """Return whether the informers have shown the result of the last apply of each of these manifests."""
        applied = (self._applied.get(child_of(manifest)) for manifest in manifests)
        return all(last is None or last.confirmed for last in applied)

    def retry_seconds(self, manifests: Iterable[Manifest]) -> float | None:
        """Return in how many seconds these manifests should be applied again although nothing changed, or None.

        Those that are not confirmed are not meant: an event of the watch, or a check after CACHE_LAG_SECONDS, does.
        """
        times = [time for manifest in manifests if (time := self._retry_at(child_of(manifest))) is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def _retry_at(self, child: Child) -> float | None:
        failed, applied = self._failed.get(child), self._applied.get(child)
        if failed:
            return failed.retry_at
        return applied.repair_at if applied is not None and applied.drifted else None

    def _is_up_to_date(self, child: Child, text: str, record: ChildRecord | None) -> bool:
        """Return whether nothing needs to be sent: the child is as it was applied, or it is too early to say."""
        applied, now = self._applied.get(child), self._clock()
        if applied is None or applied.text != text:
            return False
        if self._shows(applied, record):
            return True
        if not applied.confirmed and record == applied.before and now - applied.at < CACHE_LAG_SECONDS:
            return True
        applied.drifted = True
        return now < applied.repair_at

    def _shows(self, applied: LastApply, record: ChildRecord | None) -> bool:
        """Return whether an informer's record is the result of the last apply, and note that it is."""
        if record is None or record.ours_digest != applied.ours or record.deleting:
            return False
        applied.confirmed, applied.drifted = True, False
        return True

    async def _attempt(
        self, child: Child, manifest: Manifest, owner_uid: str, record: ChildRecord | None, text: str
    ) -> ChildProblem | None:
        kind, _, name = child
        try:
            current = record or await self._read(child)
            problem = obstacle(current, manifest, owner_uid) if current else None
            if problem:
                return problem
            resource = await self._send(manifest, current)
        except ClusterError as error:
            if isinstance(error, Refused):
                return ChildProblem(kind, name, "Refused", error.sentence)
            return ChildProblem(kind, name, "Unavailable", error.sentence)
        self._note_apply(child, text, ours_digest(resource), record)
        return None

    async def _send(self, manifest: Manifest, current: ChildRecord | None) -> dict[str, Any]:
        """Apply the manifest to the object that was seen, and to no other one.

        Without force, an object that appeared since then keeps the fields of its owner.
        """
        if current is None:
            return await self._client.apply(manifest, force=False)
        if is_orphan(current):
            log.info("%s %s/%s has no controller any more and is adopted", *current.child)
        if current.kind == WORKLOADS.kind and "replicas" not in manifest["spec"]:
            await self._hand_over_replicas(current)
        return await self._client.apply(manifest, force=True, uid=current.uid)

    async def _hand_over_replicas(self, current: ChildRecord) -> None:
        """Keep the number of replicas of a Deployment whose manifest leaves it to an autoscaler.

        The API server resets a field that its only owner drops, here to one replica. Another name owns the number
        therefore, until the autoscaler changes it. A Conflict says that the autoscaler has done so. A Deployment
        without replicas is left to be reset, because autoscalers pass over it.
        """
        resource = await self._client.get(WORKLOADS, current.namespace, current.name)
        if resource is None or not resource["spec"]["replicas"]:
            return
        manifest = {
            "apiVersion": WORKLOADS.api_version,
            "kind": WORKLOADS.kind,
            "metadata": {"namespace": current.namespace, "name": current.name},
            "spec": {"replicas": resource["spec"]["replicas"]},
        }
        with contextlib.suppress(Conflict):
            await self._client.apply(manifest, force=False, uid=current.uid, manager=HAND_OVER_MANAGER)

    async def _read(self, child: Child) -> ChildRecord | None:
        """Read the metadata of an object that the informer does not have."""
        kind = APPLIED[child[0]]
        resource = await self._client.get(kind, *child[1:], metadata_only=True)
        return project_child(kind)(resource) if resource else None

    def _note_apply(self, child: Child, text: str, ours: str, record: ChildRecord | None) -> None:
        last, now = self._applied.get(child), self._clock()
        repairs = last.repairs + 1 if last and last.text == text and now - last.at < SETTLED_SECONDS else 0
        self._applied[child] = LastApply(text, ours, now, record, repairs=repairs)

    def _note_failure(self, child: Child, text: str, state: tuple[object, ...], problem: ChildProblem) -> None:
        last = self._failed.get(child)
        attempts = last.attempts + 1 if last and (last.text, last.state) == (text, state) else 1
        self._failed[child] = FailedApply(text, state, attempts, self._clock() + _pause(attempts), problem)


def _state(record: ChildRecord | None) -> tuple[object, ...]:
    """Return the part of a record that decides whether a failed apply is worth another attempt."""
    return () if record is None else (record.uid, record.controller_uid, record.deleting, record.deployment)


def child_of(manifest: Manifest) -> Child:
    """Return kind, namespace and name of a manifest."""
    return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _pause(attempts: int) -> float:
    """Return the seconds before the next attempt after this many of them."""
    return back_off(attempts, first=FIRST_RETRY_SECONDS, most=MAX_RETRY_SECONDS)
