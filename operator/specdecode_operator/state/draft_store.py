"""Store of the rollouts of drafts, in the ConfigMaps ``<name>-drafts``.

A ConfigMap is written with every change, before the change takes effect; nothing is written for deployments that never
had a candidate or a command.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from specdecode_operator.kube.digests import text_digest
from specdecode_operator.kube.kinds import CONFIG_MAPS
from specdecode_operator.manifests import drafts_config_map, drafts_name
from specdecode_operator.state.draft_record import UNUSED, DraftRecord, parse_drafts, render_drafts, unknown_drafts
from specdecode_operator.state.sections import MAX_UNKNOWN_BYTES
from specdecode_operator.state.store import Applier, Reader, is_owned
from specdecode_operator.types import ChildProblem, Deployment, Key

log = logging.getLogger(__name__)


class DraftStore:
    """Stored rollouts by the uid of their deployment."""

    def __init__(self, reader: Reader, applier: Applier) -> None:
        """Create an empty store.

        Args:
            reader: Reads the ConfigMap.
            applier: Writes the ConfigMap, if it is owned by the deployment or does not exist.
        """
        self._reader = reader
        self._applier = applier
        self._loaded: dict[str, str] = {}
        """Digests of the sections that were loaded and not written since."""
        self._written: set[str] = set()
        """Deployments whose ConfigMap this process wrote. From then on the applier compares, and repairs."""
        self._unknown: dict[str, Mapping[str, str]] = {}
        """Sections of a newer operator."""

    async def load(self, key: Key, uid: str) -> DraftRecord:
        """Return the stored record. One that is absent or of another owner is unused. Raises ClusterError."""
        config_map = await self._reader.get(CONFIG_MAPS, key[0], drafts_name(key[1]))
        if config_map is None or not is_owned(config_map, uid):
            return UNUSED
        data = config_map.get("data") or {}
        record, problems = parse_drafts(data)
        for problem in problems:
            log.warning("%s/%s: drafts not read: %s", *key, problem)
        unknown = unknown_drafts(data)
        if sum(len(text.encode()) for text in unknown.values()) <= MAX_UNKNOWN_BYTES:
            self._unknown[uid] = unknown
        if not problems:
            self._loaded[uid] = text_digest(render_drafts(record))
        return record

    async def save(self, deployment: Deployment, record: DraftRecord) -> ChildProblem | None:
        """Write the record if it differs from the stored one. Return the problem that prevents it."""
        uid = deployment.uid
        is_known = uid in self._loaded or uid in self._written
        if not record.is_stored and not is_known:
            # A record that could not be read stays as it is until a candidate is taken up.
            return None
        data = render_drafts(record)
        if uid not in self._written and self._loaded.get(uid) == text_digest(data):
            return None
        manifest = drafts_config_map(deployment, {**self._unknown.get(uid, {}), **data})
        problem = await self._applier.apply(manifest, uid)
        if problem is None:
            self._written.add(uid)
        return problem

    def forget(self, uid: str) -> None:
        """Drop what is known of a deployment that was deleted."""
        self._loaded.pop(uid, None)
        self._written.discard(uid)
        self._unknown.pop(uid, None)
