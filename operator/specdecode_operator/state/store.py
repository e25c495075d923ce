"""Store of what must survive the operator: the ConfigMaps ``<name>-state`` with two entries, ``state`` and ``drafts``.

A ConfigMap is written at once for a decision and for each change of the rollout of drafts, because what takes effect
must not be lost with the process; otherwise at most once a minute, and only if something was measured. Nothing is
written for deployments at rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from specdecode_operator.kube.apply import text_digest
from specdecode_operator.kube.kinds import CONFIG_MAPS, Kind
from specdecode_operator.manifests import state_config_map, state_name
from specdecode_operator.state.draft_record import UNUSED, DraftRecord, parse_drafts, render_drafts
from specdecode_operator.state.learned import LearnedState, parse_state, render_state
from specdecode_operator.state.session import Session
from specdecode_operator.types import ChildProblem, Deployment, Key

WRITE_SECONDS = 60.0
"""Shortest time between two writes of estimates. A trade: at most a minute of measurements is lost with the process."""

log = logging.getLogger(__name__)


class Applier(Protocol):
    """Writer of children (kube.apply.ChildApplier)."""

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> ChildProblem | None: ...


class Reader(Protocol):
    """Reader of objects (KubeClient)."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Any: ...


@dataclass(slots=True)
class _Written:
    """Content of a stored ConfigMap."""

    digest: str = ""
    drafts: DraftRecord = UNUSED
    at: float = 0.0
    """Time of the last write."""
    is_measured: bool = False
    """Something was measured since then."""


class StateStore:
    """Stored states by the uid of their deployment."""

    def __init__(self, reader: Reader, applier: Applier) -> None:
        """Create an empty store.

        Args:
            reader: Reads the ConfigMap.
            applier: Writes the ConfigMap.
        """
        self._reader = reader
        self._applier = applier
        self._written: dict[str, _Written] = {}

    async def load(self, key: Key, uid: str) -> Session:
        """Return the session with the stored state. What is absent, unreadable or of another owner is empty.

        Raises:
            ClusterError: The API server did not answer.
        """
        config_map = await self._reader.get(CONFIG_MAPS, key[0], state_name(key[1]))
        if config_map is None or not _is_owned(config_map, uid):
            return Session(learned=LearnedState(uid=uid), stored=False)
        data = config_map.get("data") or {}
        learned: LearnedState | None = None
        try:
            learned = parse_state(data, uid)
        except ValueError as error:
            log.warning("%s/%s: the state was not read: %s", *key, error)
        drafts = parse_drafts(data)
        if drafts.problem:
            log.warning("%s/%s: the rollout of drafts was not read: %s", *key, drafts.problem)
        self._written[uid] = _Written(digest=text_digest(data), drafts=drafts)
        return Session(learned=learned or LearnedState(uid=uid), stored=learned is not None, drafts=drafts)

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
        if not (urgent or is_due or session.drafts != before.drafts):
            return None
        data = {**render_state(session.learned), **render_drafts(session.drafts)}
        digest = text_digest(data)
        if digest != before.digest:
            problem = await self._applier.apply(state_config_map(deployment, data), deployment.uid)
            if problem is not None:
                return problem
            before.digest, before.at = digest, now
        before.drafts, before.is_measured = session.drafts, False
        return None

    def forget(self, uid: str) -> None:
        """Drop what is known of a deployment that was deleted."""
        self._written.pop(uid, None)


def _is_owned(config_map: Mapping[str, Any], uid: str) -> bool:
    """Return whether an owner reference of a ConfigMap has this uid."""
    owners = (config_map.get("metadata") or {}).get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)
