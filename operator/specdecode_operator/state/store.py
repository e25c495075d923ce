"""Store of what must survive the operator: the SpecDecodeDrafts, and the ConfigMaps ``<name>-state``.

A ConfigMap has what was learned (``state``) and the training runs (``training``). It is written at once for a decision,
because what takes effect must not be lost with the process; otherwise at most once a minute, and only if something was
measured. Drafts are written with each change, before it. Nothing is written for deployments at rest.

``spec.role`` of a draft says what should be and ``status.phase`` what is, so that a user's change shows as a difference
of both. A write of several drafts may end between any two of them: each state in between is one from which the rollout
goes on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdecode_operator.api.draft import (
    DRAFT_KIND,
    UNRESOLVED,
    DraftBase,
    DraftPhase,
    DraftResourceSpec,
    DraftResourceStatus,
    Phase,
    SpecDecodeDraft,
)
from specdecode_operator.api.schema import GROUP, NAME_LABEL, VERSION
from specdecode_operator.api.v1alpha1 import Condition, DraftLineageStatus, NameRef
from specdecode_operator.errors import ClusterError, NotFound, Refused
from specdecode_operator.kube.apply import ChildApplier, text_digest
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import CONFIG_MAPS, DRAFTS
from specdecode_operator.manifests import plan_name, state_config_map, state_name
from specdecode_operator.rollout.phases import evidence_text, gain_of
from specdecode_operator.rollout.runs import RUN_PHASES
from specdecode_operator.state.learned import (
    LINEAGE,
    TRAINING_KEY,
    UNUSED,
    DraftRecord,
    LearnedState,
    Session,
    parse_state,
    parse_training,
    plan_of,
    render_state,
    render_training,
)
from specdecode_operator.times import iso, seconds_of_timestamp
from specdecode_operator.types import ChildProblem, Deployment, Key

_IN_HAND: Mapping[DraftPhase, Phase] = {
    "Promoting": Phase.PROMOTING,
    "RollingBack": Phase.ROLLING_BACK,
    "Canary": Phase.CANARY,
}
"""Phase of the rollout by the phase of the draft that is in hand."""
_TRAINED = {"app.kubernetes.io/managed-by": "specdecode"}
"""Label of the drafts that the operator created, which it deletes again once they are old."""
HASH_IN_NAME = 12
"""Characters of the hash in the name of a trained draft."""


# The record, from the drafts.


def record_of(drafts: Sequence[SpecDecodeDraft], known: DraftRecord) -> DraftRecord:
    """Return the rollout as the drafts show it.

    Args:
        drafts: Drafts of the deployment, in the order of their names.
        known: The record before, or after a restart that of the ConfigMap. A draft in hand that was deleted is taken
            from it, so that its end is noted.
    """
    by_id = {draft.id: draft for draft in reversed(drafts)}
    serving = _serving(drafts)
    held = next((draft for phase in _IN_HAND for draft in drafts if draft.status.phase == phase), None)
    phase, since = _phase(drafts, held, known)
    is_deleted = bool(known.current) and known.current not in by_id and serving is None
    current = known.current if is_deleted else serving.id if serving else ""
    candidate = known.candidate if held is None and phase in _IN_HAND.values() else ""
    update: dict[str, Any] = {"is_confirmed": False, "canary_losses": 0, "trial": None}
    if held is not None and phase is not Phase.ROLLING_BACK:
        status, candidate = held.status, held.id
        update = {name: getattr(status, name) for name in ("is_confirmed", "canary_losses", "trial")}
    elif candidate:
        update = {}
    previous = known.previous if is_deleted else _previous(serving, by_id)
    all_uris = {**known.uris, **{one: draft.spec.uri for one, draft in by_id.items()}}
    uris = {one: all_uris[one] for one in (candidate, current, previous) if one in all_uris}
    base = next((one.spec.base for one in (serving, held) if one is not None and one.spec.base is not None), None)
    if base is not None:
        update |= {"spec_draft": base.draft, "target": base.target, "method": base.method, "spec_hash": base.hash}
    return known.model_copy(
        update={
            **update,
            "phase": phase,
            "since": since,
            "current": current,
            "candidate": candidate,
            "previous": previous,
            "uris": uris,
            "run": known.run if phase in RUN_PHASES else None,
            "lineage": tuple(_lineage(drafts))[:LINEAGE],
        }
    )


def _phase(drafts: Iterable[SpecDecodeDraft], held: SpecDecodeDraft | None, known: DraftRecord) -> tuple[Phase, float]:
    """Return the phase and its beginning. Drafts are written before the ConfigMap, which may be a phase behind."""
    if held is not None and held.status.phase is not None:
        return _IN_HAND[held.status.phase], _seconds(held.status.since)
    newest = max((_seconds(draft.status.since) for draft in drafts), default=0.0)
    if known.phase in _IN_HAND.values() and newest > known.since:
        return Phase.COOLDOWN, newest
    return known.phase, known.since


def _serving(drafts: Iterable[SpecDecodeDraft]) -> SpecDecodeDraft | None:
    """Return the draft that serves; of two, after a write that was cut off, the one that no other replaces."""
    serving = [draft for draft in drafts if draft.status.phase in ("Promoting", "Serving")]
    replaced = {draft.spec.replaces for draft in serving}
    return next((draft for draft in serving if draft.id not in replaced), next(iter(serving), None))


def _previous(serving: SpecDecodeDraft | None, by_id: Mapping[str, SpecDecodeDraft]) -> str | None:
    """Return the draft that a rollback returns to; empty for that of the spec, None where that serves."""
    if serving is None:
        return None
    return serving.spec.replaces if serving.spec.replaces in by_id else ""


def _lineage(drafts: Iterable[SpecDecodeDraft]) -> Iterator[DraftLineageStatus]:
    ended = [draft for draft in drafts if draft.status.outcome is not None]
    for draft in sorted(ended, key=lambda one: one.status.outcome_time or "", reverse=True):
        status = draft.status
        assert status.outcome is not None
        yield DraftLineageStatus(
            hash=draft.id,
            uri=draft.spec.uri,
            time=status.outcome_time or "",
            outcome=status.outcome,
            pairs=status.pairs,
            gain_percent=status.gain_percent,
            reason=status.reason,
        )


def _seconds(timestamp: str | None) -> float:
    return seconds_of_timestamp(timestamp) if timestamp else 0.0


# The drafts, from the record.


@dataclass(frozen=True, slots=True)
class DraftWrite:
    """A draft that is to be created or changed."""

    before: SpecDecodeDraft | None
    """None for a new one."""
    after: SpecDecodeDraft


def draft_writes(
    deployment: Deployment, record: DraftRecord, drafts: Sequence[SpecDecodeDraft], *, now: float
) -> list[DraftWrite]:
    """Return what is to be written so that the drafts show a record. The draft that serves comes first.

    Args:
        deployment: The resource.
        record: Its rollout.
        drafts: Its drafts as they are.
        now: Operator's clock, in seconds since the epoch.
    """
    known = {_id(record, draft) for draft in drafts}
    new = [one for one in dict.fromkeys((record.current, record.candidate)) if one and one not in known]
    writes = [
        DraftWrite(None, _with_status(_created(deployment, record, one), record, one, now))
        for one in new
        if one in record.uris and not one.startswith(UNRESOLVED)
    ]
    for draft in drafts:
        one = _id(record, draft)
        after = _with_status(_with_role(draft, record, one), record, one, now)
        if after != draft:
            writes.append(DraftWrite(draft, after))
    return sorted(writes, key=lambda write: write.after.id != record.current)


def with_writes(drafts: Iterable[SpecDecodeDraft], writes: Iterable[DraftWrite]) -> tuple[SpecDecodeDraft, ...]:
    """Return the drafts as they will be once all is written."""
    by_name = {draft.name: draft for draft in (*drafts, *(write.after for write in writes))}
    return tuple(by_name[name] for name in sorted(by_name))


def surplus(drafts: Sequence[SpecDecodeDraft]) -> list[SpecDecodeDraft]:
    """Return the trained drafts that ended so long ago that no lineage has them, but not what a rollback restores."""
    previous = {draft.spec.replaces for draft in drafts if draft.spec.role == "Serving"}
    retired = [draft for draft in drafts if draft.spec.role == draft.status.phase == "Retired"]
    ended = [draft for draft in retired if draft.id not in previous]
    ended.sort(key=lambda draft: draft.status.outcome_time or "", reverse=True)
    return [draft for draft in ended[LINEAGE:] if _TRAINED.items() <= (draft.metadata.get("labels") or {}).items()]


def manifest_of(draft: SpecDecodeDraft) -> dict[str, Any]:
    """Return a draft as the API server takes it."""
    document = draft.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": DRAFT_KIND, **document}


def _id(record: DraftRecord, draft: SpecDecodeDraft) -> str:
    """Return the id of a draft in the record: its hash as soon as a worker has reported it."""
    found = (one for one in (record.candidate, record.current) if one and record.uris.get(one) == draft.spec.uri)
    return draft.id if draft.spec.hash else next(found, draft.id)


def _created(deployment: Deployment, record: DraftRecord, draft: str) -> SpecDecodeDraft:
    name = re.sub(r"[^a-z0-9]", "-", draft[:HASH_IN_NAME].lower()).strip("-")
    metadata = {
        "name": f"{deployment.name}-{name}",
        "namespace": deployment.namespace,
        "labels": {NAME_LABEL: deployment.name, **_TRAINED},
    }
    spec = DraftResourceSpec(deployment_ref=NameRef(name=deployment.name), uri=record.uris[draft], hash=draft)
    return _with_role(SpecDecodeDraft(metadata=metadata, spec=spec), record, draft)


def _with_role(draft: SpecDecodeDraft, record: DraftRecord, one: str) -> SpecDecodeDraft:
    """Return a draft with the role that the record gives it, and with what it was compared with."""
    update: dict[str, Any] = {}
    if one == record.current:
        update = {"role": "Serving", "replaces": record.previous or None}
    elif not _is_tried(record, one) and (not draft.is_offered or _has_ended(draft, record, one)):
        update = {"role": "Retired"}
    if one in (record.current, record.candidate):
        update["hash"] = None if one.startswith(UNRESOLVED) else one
        update["base"] = DraftBase(
            target=record.target, draft=record.spec_draft, method=record.method, hash=record.spec_hash
        )
    return draft.model_copy(update={"spec": draft.spec.model_copy(update=update)})


def _is_tried(record: DraftRecord, one: str) -> bool:
    return record.phase is Phase.CANARY and one == record.candidate


def _has_ended(draft: SpecDecodeDraft, record: DraftRecord, one: str) -> bool:
    """Return whether an offer ended with this record: refused, or replaced by the draft that serves now."""
    entry = next((entry for entry in record.lineage if entry.hash == one), None)
    is_news = entry is not None and (entry.outcome, entry.time) != (draft.status.outcome, draft.status.outcome_time)
    # A retired draft that a user makes Serving again is another offer, which may wait.
    is_replaced = draft.spec.role == "Serving" and draft.status.phase != "Retired" and one == record.previous
    return is_news or is_replaced


def _with_status(draft: SpecDecodeDraft, record: DraftRecord, one: str, now: float) -> SpecDecodeDraft:
    before = draft.status
    phase = _phase_of(draft, record, one)
    since = iso(record.since) if phase in _IN_HAND else before.since if phase == before.phase else iso(now)
    update: dict[str, Any] = {"phase": phase, "since": None if phase == "Waiting" else since}
    if _is_tried(record, one):
        update |= {
            **_measured(record),
            "outcome": None,
            "outcome_time": None,
            "is_confirmed": record.is_confirmed,
            "canary_losses": record.canary_losses,
            "trial": record.trial,
        }
    else:
        update |= {"trial": None, "is_confirmed": one == record.current and record.phase is Phase.PROMOTING}
    entry = next((entry for entry in record.lineage if entry.hash == one), None)
    if entry is not None and not _is_tried(record, one):
        update |= {
            "outcome": entry.outcome,
            "outcome_time": entry.time,
            "pairs": entry.pairs,
            "gain_percent": entry.gain_percent,
            "reason": entry.reason,
        }
    if record.last_run is not None and record.last_run.hash == one:
        update["evaluation"] = record.last_run
    after = before.model_copy(update=update)
    return draft.model_copy(update={"status": after.model_copy(update={"conditions": (_condition(after, now),)})})


def _phase_of(draft: SpecDecodeDraft, record: DraftRecord, one: str) -> DraftPhase:
    before = draft.status.phase
    if one == record.current:
        return "Promoting" if record.phase is Phase.PROMOTING else "Serving"
    if _is_tried(record, one):
        return "Canary"
    is_left = record.phase is Phase.ROLLING_BACK and before in ("Serving", *_IN_HAND)
    if draft.is_offered and before in (None, "Waiting"):
        return "Waiting"
    return "RollingBack" if is_left else "Retired"


def _measured(record: DraftRecord) -> dict[str, Any]:
    """Return the evidence of the trial so far."""
    gain = gain_of(record.trial) if record.trial else None
    waits = "it waits for role Serving (kubectl specdecode promote): " if record.is_confirmed else ""
    return {
        "pairs": len(record.trial.pairs) if record.trial else 0,
        "gain_percent": _percent(gain.mean) if gain else None,
        "least_gain_percent": _percent(gain.least) if gain else None,
        "most_gain_percent": _percent(gain.most) if gain else None,
        "reason": (waits + evidence_text(record.trial))[:1000],
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def _condition(status: DraftResourceStatus, now: float) -> Condition:
    is_serving = "True" if status.phase == "Serving" else "False"
    known = next(iter(status.conditions), None)
    since = known.last_transition_time if known is not None and known.status == is_serving else iso(now)
    return Condition(
        type="Serving",
        status=is_serving,
        reason=(status.phase == "Retired" and status.outcome) or status.phase or "Waiting",
        message=status.reason,
        last_transition_time=since,
    )


# Reading and writing of the stored state.

WRITE_SECONDS = 60.0
"""Shortest time between two writes of estimates. A trade: at most a minute of measurements is lost with the process."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Written:
    """Content of a stored ConfigMap."""

    digest: str = ""
    training: str = ""
    """Text of the training runs."""
    at: float = 0.0
    """Time of the last write."""
    is_measured: bool = False
    """Something was measured since then."""


class StateStore:
    """Stored states by the uid of their deployment."""

    def __init__(self, client: KubeClient, applier: ChildApplier, note_draft: Callable[[Any], None]) -> None:
        """Create an empty store.

        Args:
            client: Reads the ConfigMap and writes drafts.
            applier: Writes the ConfigMap.
            note_draft: Takes a SpecDecodeDraft as the API server returned it.
        """
        self._client = client
        self._applier = applier
        self._note_draft = note_draft
        self._written: dict[str, _Written] = {}

    async def load(self, key: Key, uid: str) -> Session:
        """Return the session with the stored state. What is absent, unreadable or of another owner is empty.

        Raises:
            ClusterError: The API server did not answer.
        """
        plan = plan_of(await self._data(key, plan_name(key[1]), uid) or {}, uid)
        data = await self._data(key, state_name(key[1]), uid)
        if data is None:
            return Session(learned=LearnedState(uid=uid, plan=plan), stored=False)
        learned: LearnedState | None = None
        try:
            learned = parse_state(data, uid, plan)
        except ValueError as error:
            log.warning("%s/%s: the state was not read: %s", *key, error)
        drafts = UNUSED
        try:
            drafts = parse_training(data)
        except ValueError as error:
            log.warning("%s/%s: the training runs were not read: %s", *key, error)
        self._written[uid] = _Written(digest=text_digest(data), training=data.get(TRAINING_KEY, ""))
        return Session(learned=learned or LearnedState(uid=uid, plan=plan), stored=learned is not None, drafts=drafts)

    async def _data(self, key: Key, name: str, uid: str) -> Mapping[str, str] | None:
        """Return the data of a ConfigMap of the deployment with this uid; None if there is none."""
        config_map = await self._client.get(CONFIG_MAPS, key[0], name)
        if config_map is None or not _is_owned(config_map, uid):
            return None
        return config_map.get("data") or {}

    async def save(
        self, deployment: Deployment, session: Session, *, urgent: bool, learnt: bool = True, now: float
    ) -> ChildProblem | None:
        """Write the state if that is due.

        Args:
            deployment: Owner of the state.
            session: New state.
            urgent: The state has a decision: write at once.
            learnt: Something was measured: write once WRITE_SECONDS have passed since the last write.
            now: Time in seconds since the epoch.

        Returns:
            The problem that prevents the write; it is due again with the next call. None if nothing prevents it.
        """
        before = self._written.setdefault(deployment.uid, _Written())
        before.is_measured |= learnt
        is_due = before.is_measured and now - before.at >= WRITE_SECONDS
        training = render_training(session.drafts)
        if not (urgent or is_due or training.get(TRAINING_KEY, "") != before.training):
            return None
        data = {**render_state(session.learned), **training}
        digest = text_digest(data)
        if digest != before.digest:
            problem = await self._applier.apply(state_config_map(deployment, data), deployment.uid)
            if problem is not None:
                return problem
            before.digest, before.at = digest, now
        before.training, before.is_measured = training.get(TRAINING_KEY, ""), False
        return None

    async def save_drafts(
        self, deployment: Deployment, writes: Iterable[DraftWrite], ended: Iterable[SpecDecodeDraft]
    ) -> ChildProblem | None:
        """Write drafts to the API server, and delete old ones.

        Args:
            deployment: The resource.
            writes: Drafts to create or change.
            ended: Drafts to delete.

        Returns:
            The problem that prevents a write; nothing is written after it. None if all is written.
        """
        for write in writes:
            try:
                await self._write_draft(write)
            except ClusterError as error:
                if write.before is not None and isinstance(error, NotFound):
                    continue  # a user deleted it, which the watch will show
                is_refused = isinstance(error, Refused)
                name = write.after.name
                return ChildProblem(DRAFTS.kind, name, "Refused" if is_refused else "Unavailable", error.sentence)
        for draft in ended:
            try:
                await self._client.delete(DRAFTS, deployment.namespace, draft.name, uid=draft.uid)
            except ClusterError as error:
                log.warning("%s/%s: %s", *deployment.key, error)
        return None

    async def _write_draft(self, write: DraftWrite) -> None:
        manifest = manifest_of(write.after)
        status = manifest.pop("status")
        if write.before is None:
            manifest = await self._client.create(DRAFTS, manifest)
            self._note_draft(manifest)
        elif write.before.spec != write.after.spec:
            manifest = await self._client.update(DRAFTS, manifest)
            self._note_draft(manifest)
        if write.before is None or write.before.status != write.after.status:
            self._note_draft(await self._client.update(DRAFTS, {**manifest, "status": status}, subresource="status"))

    def forget(self, uid: str) -> None:
        """Drop what is known of a deployment that was deleted."""
        self._written.pop(uid, None)


def _is_owned(config_map: Mapping[str, Any], uid: str) -> bool:
    """Return whether an owner reference of a ConfigMap has this uid."""
    owners = (config_map.get("metadata") or {}).get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)
