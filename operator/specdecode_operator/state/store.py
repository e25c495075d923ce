"""Store of what must survive the operator: the SpecDecodeDrafts, and the ConfigMaps ``<name>-state``.

A ConfigMap has what was learned (``state``) and the training runs (``training``). It is written at once for a decision,
because what takes effect must not be lost with the process; otherwise at most once a minute, and only if something was
measured. Drafts are written with each change, before it. Nothing is written for deployments at rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdecode_operator.api.draft import SpecDecodeDraft
from specdecode_operator.errors import ClusterError, Refused
from specdecode_operator.kube.apply import ChildApplier, text_digest
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import CONFIG_MAPS, DRAFTS
from specdecode_operator.manifests import plan_name, state_config_map, state_name
from specdecode_operator.rollout.draft_objects import DraftWrite, manifest_of
from specdecode_operator.state.draft_record import TRAINING_KEY, UNUSED, parse_training, render_training
from specdecode_operator.state.learned import LearnedState, parse_state, plan_of, render_state
from specdecode_operator.state.session import Session
from specdecode_operator.types import ChildProblem, Deployment, Key

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
