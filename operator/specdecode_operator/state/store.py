"""Store of the learned states of all deployments, in ConfigMaps.

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

from specdecode_operator.kube.digests import text_digest
from specdecode_operator.kube.kinds import CONFIG_MAPS, Kind
from specdecode_operator.manifests import child_names, drafts_name, state_config_map, state_name
from specdecode_operator.state.compact import decode, encode
from specdecode_operator.state.learned import LearnedState, StoredState, read_state, write_state
from specdecode_operator.state.sections import APPLIED, MAX_UNKNOWN_BYTES, version_of
from specdecode_operator.state.session import Session
from specdecode_operator.types import ChildProblem, Deployment, Key

WRITE_SECONDS = 60.0
"""Shortest time between two writes of estimates. A trade: at most a minute of measurements is lost with the process."""
LEGACY_APPLIED = "applied.json"

log = logging.getLogger(__name__)


class Applier(Protocol):
    """Writer of children (kube.apply.ChildApplier)."""

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> ChildProblem | None: ...
    def digests(self, key: Key, names: Iterable[str]) -> dict[str, str]: ...
    def recall(self, key: Key, digests: Mapping[str, str]) -> None: ...


class Reader(Protocol):
    """Reader of objects (KubeClient)."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Written:
    """Content of a stored ConfigMap. Only its digest is held: 1000 texts would be most of the process's memory."""

    digest: str = ""
    at: float = 0.0
    unknown: bytes = b""
    """Packed sections of a newer operator."""


class StateStore:
    """Stored states by the uid of their deployment."""

    def __init__(self, reader: Reader, applier: Applier) -> None:
        """Create an empty store.

        Args:
            reader: Reads the ConfigMap.
            applier: Writes the ConfigMap, and has the digests of the applied children.
        """
        self._reader = reader
        self._applier = applier
        self._written: dict[str, _Written] = {}
        self._measured: set[str] = set()
        """Deployments that were measured since the last write."""

    async def load(self, key: Key, uid: str) -> Session:
        """Return the session with the stored state, or an empty one. Raises ClusterError."""
        config_map = await self._reader.get(CONFIG_MAPS, key[0], state_name(key[1]))
        if config_map is None:
            return Session(learned=LearnedState(uid=uid), stored=False)
        data = config_map.get("data") or {}
        stored = read_state(data, uid, is_owned=is_owned(config_map, uid))
        for problem in stored.problems:
            log.warning("%s/%s: state not read: %s", *key, problem)
        if stored.learned is None:
            return Session(learned=LearnedState(uid=uid), stored=False)
        self._recall(key, uid, stored, data)
        return Session(learned=stored.learned, stored=True)

    async def save(
        self, deployment: Deployment, learned: LearnedState, *, urgent: bool, learnt: bool = True, now: float
    ) -> ChildProblem | None:
        """Write the state if that is due.

        Args:
            deployment: Owner of the state.
            learned: New state.
            urgent: The state has a decision: write at once.
            learnt: Something was measured: write once WRITE_SECONDS have passed since the last write.
            now: Time in seconds since the epoch.

        Returns:
            The problem that prevents the write; it is due again with the next call. None if nothing prevents it.
        """
        uid = deployment.uid
        if learnt:
            self._measured.add(uid)
        before = self._written.get(uid, _Written())
        if not urgent and (uid not in self._measured or now - before.at < WRITE_SECONDS):
            return None
        rendered = write_state(learned)
        digest = text_digest(rendered.data)
        if digest != before.digest:
            if rendered.dropped:
                log.warning("%s/%s: the state is too long; left out: %s", *deployment.key, _listed(rendered.dropped))
            problem = await self._write(deployment, {**_unpacked(before.unknown), **rendered.data})
            if problem is not None:
                return problem
            self._written[uid] = replace(before, digest=digest, at=now)
        self._measured.discard(uid)
        return None

    def forget(self, uid: str) -> None:
        """Drop what is known of a deployment that was deleted."""
        self._written.pop(uid, None)
        self._measured.discard(uid)

    async def _write(self, deployment: Deployment, data: Mapping[str, str]) -> ChildProblem | None:
        digests = self._applier.digests(deployment.key, child_names(deployment.name))
        for name in (state_name(deployment.name), drafts_name(deployment.name)):
            digests.pop(f"ConfigMap/{name}", None)
        sections = {**data, APPLIED: encode(version_of(APPLIED), {"children": digests})}
        return await self._applier.apply(state_config_map(deployment, sections), deployment.uid)

    def _recall(self, key: Key, uid: str, stored: StoredState, data: Mapping[str, str]) -> None:
        """Note what the ConfigMap has, so that equal text is not written again, and what was applied to children."""
        unknown = dict(stored.unknown)
        if sum(len(text.encode()) for text in unknown.values()) > MAX_UNKNOWN_BYTES:
            log.warning("%s/%s: sections of a newer operator are too long: %s", *key, ", ".join(unknown))
            unknown = {}
        ours = {key: text for key, text in data.items() if key not in (*stored.unknown, APPLIED)}
        self._written[uid] = _Written(text_digest(ours), 0.0, _packed(unknown))
        self._applier.recall(key, _digests(data))


def is_owned(config_map: Mapping[str, Any], uid: str) -> bool:
    """Return whether an owner reference of a ConfigMap has this uid."""
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
