"""Keeps every deployment's memory in the process and writes it down in its ConfigMap, seldom.

At most one write a minute, plus one with every decision: what a decision rests on must not be lost with the pod.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from specdecode_operator.cluster import CONFIG_MAPS, Cluster
from specdecode_operator.manifests import state_config_map, state_name
from specdecode_operator.memory import Kept, Memory, kept_of, state_data
from specdecode_operator.records import Deployment

WRITE_SECONDS = 60.0

log = logging.getLogger(__name__)


class MemoryStore:
    """Memories by the uid of their deployment."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._memories: dict[str, Memory] = {}
        self._written: dict[str, tuple[dict[str, str], float]] = {}

    async def load(self, deployment: Deployment) -> Memory:
        """From the process, else from the ConfigMap, else a blank one."""
        if deployment.uid not in self._memories:
            self._memories[deployment.uid] = await self._read(deployment)
        return self._memories[deployment.uid]

    async def save(self, deployment: Deployment, memory: Memory, *, urgent: bool, now: float) -> None:
        """Keeps ``memory``; writes it when it holds a decision or the last write is a minute ago."""
        self._memories[deployment.uid] = replace(memory, found=True)
        data = state_data(memory.kept)
        before, when = self._written.get(deployment.uid, ({}, 0.0))
        if data == before or (not urgent and now - when < WRITE_SECONDS):
            return
        await self._cluster.apply(state_config_map(deployment, data))
        self._written[deployment.uid] = data, now

    def forget(self, uid: str) -> None:
        self._memories.pop(uid, None)
        self._written.pop(uid, None)

    async def _read(self, deployment: Deployment) -> Memory:
        found = await self._cluster.get(CONFIG_MAPS, deployment.namespace, state_name(deployment.name))
        if found is None:
            return Memory(kept=Kept(uid=deployment.uid), found=False)
        try:
            kept = kept_of(found.get("data") or {}, deployment.uid)
        except ValueError as error:
            log.warning("%s/%s: its memory cannot be read: %s", deployment.namespace, deployment.name, error)
            kept = None
        return Memory(kept=kept or Kept(uid=deployment.uid), found=kept is not None)
