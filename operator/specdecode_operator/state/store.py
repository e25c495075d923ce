"""Keeps every deployment's memory in the process and writes it down in its ConfigMap, seldom.

At most one write a minute while something is measured, plus one with every decision: what a decision rests on must
not be lost with the pod. Nothing is written for deployments at rest. What was applied to the children stands beside it,
so that a restart of the operator need not apply them all again.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace

from specdecode_operator.kube.applied import text_digest
from specdecode_operator.kube.client import CONFIG_MAPS, KubeClient
from specdecode_operator.manifests import child_names, state_config_map, state_name
from specdecode_operator.state.learned import LearnedState, parse_state, render_state
from specdecode_operator.state.session import PackedSession, Session
from specdecode_operator.types import Deployment

WRITE_SECONDS = 60.0
APPLIED_KEY = "applied.json"
"""In the ConfigMap; no part of what is remembered of the deployment, and no reason to write it."""

log = logging.getLogger(__name__)


class StateStore:
    """Memories by the uid of their deployment."""

    def __init__(self, cluster: KubeClient) -> None:
        self._cluster = cluster
        self._memories: dict[str, PackedSession] = {}
        self._written: dict[str, tuple[str, float]] = {}
        """Digest and time of the last write; a thousand whole texts would be most of the process."""
        self._learnt: set[str] = set()
        """Who measured something since then."""

    async def load(self, deployment: Deployment) -> Session:
        """From the process, else from the ConfigMap, else a blank one."""
        known = self._memories.get(deployment.uid)
        if known is not None:
            return known.memory
        memory = await self._read(deployment)
        self._memories[deployment.uid] = PackedSession.of(memory)
        return memory

    async def save(
        self, deployment: Deployment, memory: Session, *, urgent: bool, learnt: bool = True, now: float
    ) -> None:
        """Keeps ``memory``; writes it when it holds a decision, or something new and the last write is a minute ago."""
        uid = deployment.uid
        self._memories[uid] = PackedSession.of(replace(memory, found=True))
        if learnt:
            self._learnt.add(uid)
        before, when = self._written.get(uid, ("", 0.0))
        if not urgent and (uid not in self._learnt or now - when < WRITE_SECONDS):
            return
        data = render_state(memory.learned)
        digest = text_digest(data)
        if digest != before:
            told = self._cluster.applied.told(deployment.namespace, child_names(deployment.name))
            told.pop(f"ConfigMap/{state_name(deployment.name)}", None)
            await self._cluster.apply(state_config_map(deployment, {**data, APPLIED_KEY: json.dumps(told)}))
        self._written[uid] = digest, now if digest != before else when
        self._learnt.discard(uid)

    def forget(self, uid: str) -> None:
        self._memories.pop(uid, None)
        self._written.pop(uid, None)
        self._learnt.discard(uid)

    async def _read(self, deployment: Deployment) -> Session:
        found = await self._cluster.get(CONFIG_MAPS, deployment.namespace, state_name(deployment.name))
        if found is None:
            return Session(learned=LearnedState(uid=deployment.uid), found=False)
        try:
            learned = parse_state(found.get("data") or {}, deployment.uid)
        except ValueError as error:
            log.warning("%s/%s: its memory cannot be read: %s", deployment.namespace, deployment.name, error)
            learned = None
        if learned is not None:
            self._recall(deployment, dict(found["data"]))
        return Session(learned=learned or LearnedState(uid=deployment.uid), found=learned is not None)

    def _recall(self, deployment: Deployment, data: dict[str, str]) -> None:
        """What stands in the ConfigMap was written, and need not be again."""
        told = data.pop(APPLIED_KEY, "{}")
        self._written[deployment.uid] = text_digest(data), 0.0
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            self._cluster.applied.recall(deployment.namespace, json.loads(told))
