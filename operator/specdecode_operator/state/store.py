"""Store of the sessions of all deployments: packed in the process, and their learned state in ConfigMaps.

The ConfigMap ``<name>-state`` is written at once for a decision, because what a decision rests on must not be lost
with the pod; otherwise at most once a minute, and only if something was measured. Nothing is written for deployments at
rest. It also has digests of the applied children, so that a new process need not apply them all again.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from specdecode_operator.errors import Refused, Unavailable
from specdecode_operator.kube.applied import text_digest
from specdecode_operator.kube.client import CONFIG_MAPS, Kind
from specdecode_operator.manifests import child_names, state_config_map, state_name
from specdecode_operator.state.compact import decode, encode
from specdecode_operator.state.learned import LearnedState, StoredState, read_state, write_state
from specdecode_operator.state.sections import APPLIED, MAX_UNKNOWN_BYTES, version_of
from specdecode_operator.state.session import PackedSession, Session
from specdecode_operator.types import ChildProblem, Deployment

WRITE_SECONDS = 60.0
"""Shortest time between two writes of estimates. A trade: at most a minute of measurements is lost with the process."""
LEGACY_APPLIED = "applied.json"

log = logging.getLogger(__name__)


class AppliedDigests(Protocol):
    """Digests of what was applied to each child (kube.applied.ApplyCache)."""

    def told(self, namespace: str, names: Iterable[str]) -> dict[str, str]: ...
    def recall(self, namespace: str, told: Mapping[str, str]) -> None: ...


class Applier(Protocol):
    """Writer of children. A ChildProblem that it returns counts as a failed write."""

    async def apply(self, manifest: Mapping[str, Any]) -> Any: ...


class Reader(Protocol):
    """Reader of objects (KubeClient)."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Written:
    """What the ConfigMap has. A thousand whole texts would be most of the process, so that only a digest is held."""

    digest: str = ""
    at: float = 0.0
    unknown: bytes = b""
    """Packed sections of a newer operator."""


class StateStore:
    """Sessions by the uid of their deployment."""

    def __init__(self, client: Any, applier: Applier | None = None, applied: AppliedDigests | None = None) -> None:
        """Create an empty store.

        Args:
            client: Reads the ConfigMap. Also writes it and has the digests (``client.applied``) where these are None.
            applier: Writes the ConfigMap.
            applied: Digests of the applied children, persisted in the section ``applied``.
        """
        self._reader: Reader = client
        self._applier: Applier = applier or client
        self._applied: AppliedDigests = client.applied if applied is None else applied
        self._sessions: dict[str, PackedSession] = {}
        self._written: dict[str, _Written] = {}
        self._measured: set[str] = set()
        """Deployments that were measured since the last write."""

    async def load(self, deployment: Deployment) -> Session:
        """Return the session from the process, else from the ConfigMap, else an empty one."""
        known = self._sessions.get(deployment.uid)
        if known is not None:
            return known.session
        session = await self._read(deployment)
        self._sessions[deployment.uid] = PackedSession.of(session)
        return session

    async def save(
        self, deployment: Deployment, session: Session, *, urgent: bool, learnt: bool = True, now: float
    ) -> None:
        """Hold ``session``, and write its learned state if that is due.

        Args:
            deployment: Owner of the state.
            session: New session.
            urgent: The session has a decision: write at once.
            learnt: Something was measured: write once WRITE_SECONDS have passed since the last write.
            now: Time in seconds since the epoch.

        Raises:
            ClusterError: The ConfigMap was not written; it is due again with the next call.
        """
        uid = deployment.uid
        self._sessions[uid] = PackedSession.of(replace(session, found=True), self._sessions.get(uid))
        if learnt:
            self._measured.add(uid)
        before = self._written.get(uid, _Written())
        if not urgent and (uid not in self._measured or now - before.at < WRITE_SECONDS):
            return
        rendered = write_state(session.learned)
        digest = text_digest(rendered.data)
        if digest != before.digest:
            if rendered.dropped:
                log.warning("%s/%s: the state is too long; left out: %s", *deployment.key, _listed(rendered.dropped))
            await self._write(deployment, {**_unpacked(before.unknown), **rendered.data})
            self._written[uid] = replace(before, digest=digest, at=now)
        self._measured.discard(uid)

    def forget(self, uid: str) -> None:
        """Drop the session of a deployment that was deleted."""
        self._sessions.pop(uid, None)
        self._written.pop(uid, None)
        self._measured.discard(uid)

    async def _write(self, deployment: Deployment, data: Mapping[str, str]) -> None:
        digests = self._applied.told(deployment.namespace, child_names(deployment.name))
        digests.pop(f"ConfigMap/{state_name(deployment.name)}", None)
        sections = {**data, APPLIED: encode(version_of(APPLIED), {"children": digests})}
        result = await self._applier.apply(state_config_map(deployment, sections))
        if isinstance(result, ChildProblem):
            raise Unavailable(str(result)) if result.reason == "Unavailable" else Refused(str(result))

    async def _read(self, deployment: Deployment) -> Session:
        config_map = await self._reader.get(CONFIG_MAPS, deployment.namespace, state_name(deployment.name))
        if config_map is None:
            return Session(learned=LearnedState(uid=deployment.uid), found=False)
        data = config_map.get("data") or {}
        stored = read_state(data, deployment.uid, is_owned=_is_owned(config_map, deployment.uid))
        for problem in stored.problems:
            log.warning("%s/%s: state not read: %s", *deployment.key, problem)
        if stored.learned is None:
            return Session(learned=LearnedState(uid=deployment.uid), found=False)
        self._recall(deployment, stored, data)
        return Session(learned=stored.learned, found=True)

    def _recall(self, deployment: Deployment, stored: StoredState, data: Mapping[str, str]) -> None:
        """Note what the ConfigMap has, so that equal text is not written again, and what was applied to children."""
        unknown = dict(stored.unknown)
        if sum(len(text.encode()) for text in unknown.values()) > MAX_UNKNOWN_BYTES:
            log.warning("%s/%s: sections of a newer operator are too long: %s", *deployment.key, ", ".join(unknown))
            unknown = {}
        ours = {key: text for key, text in data.items() if key not in (*stored.unknown, APPLIED)}
        self._written[deployment.uid] = _Written(text_digest(ours), 0.0, _packed(unknown))
        self._applied.recall(deployment.namespace, _digests(data))


def _is_owned(config_map: Mapping[str, Any], uid: str) -> bool:
    owners = (config_map.get("metadata") or {}).get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)


def _digests(data: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of the applied children; none if they cannot be read: then the children are applied."""
    try:
        digests = decode(data[APPLIED])[1]["children"] if APPLIED in data else json.loads(data[LEGACY_APPLIED])
        return {child: text for child, text in digests.items() if isinstance(text, str)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _packed(sections: Mapping[str, str]) -> bytes:
    return zlib.compress(json.dumps(sections).encode()) if sections else b""


def _unpacked(sections: bytes) -> dict[str, str]:
    return dict(json.loads(zlib.decompress(sections))) if sections else {}


def _listed(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in dropped.items())
