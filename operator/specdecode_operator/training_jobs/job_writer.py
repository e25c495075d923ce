"""Creation and deletion of training Jobs. A Job is created once and never applied again, because Kueue changes it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specdecode_operator.errors import ClusterError, Conflict
from specdecode_operator.kube.children import controller_of
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import JOBS
from specdecode_operator.times import back_off
from specdecode_operator.types import Key, Manifest, TrainingJob

FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 2.0, 120.0
"""Pause after a refused creation; it doubles from refusal to refusal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Latest refused creation of a Job."""

    name: str
    """Name of the Job."""
    message: str
    attempts: int
    retry_at: float


class JobWriter:
    """Training Jobs of all deployments. Every call may be repeated."""

    def __init__(self, client: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._refused: dict[Key, Refusal] = {}
        """By key of the deployment, which wants one Job at a time."""

    async def carry_out(self, key: Key, wanted: Manifest | None, ended: Iterable[TrainingJob]) -> str:
        """Create the wanted Job and delete those that ended.

        Args:
            key: Key of the deployment.
            wanted: Manifest of the Job to create; None if none is due.
            ended: Jobs to delete with their pods.

        Returns:
            The reason why the Job could not be created; empty if it could, or none is due.

        Raises:
            NotLeader: This process may not write.
        """
        for job in ended:
            try:
                await self._client.delete(JOBS, key[0], job.name, uid=job.uid)
                log.info("%s/%s: deleted Job %s", *key, job.name)
            except Conflict:
                log.info("%s/%s: Job %s was replaced meanwhile", *key, job.name)
            except ClusterError as error:
                log.warning("%s/%s: %s", *key, error)
        name = wanted["metadata"]["name"] if wanted is not None else ""
        refused = self._refused.get(key)
        if refused is not None and refused.name != name:
            del self._refused[key]
            refused = None
        if wanted is None:
            return ""
        if refused is not None and self._clock() < refused.retry_at:
            return refused.message
        problem = await self._create(wanted)
        if not problem:
            self._refused.pop(key, None)
            return ""
        attempts = refused.attempts + 1 if refused else 1
        pause = back_off(attempts, first=FIRST_RETRY_SECONDS, most=MAX_RETRY_SECONDS)
        self._refused[key] = Refusal(name, problem, attempts, self._clock() + pause)
        return problem

    def forget(self, key: Key) -> None:
        """Forget the refusal of a deployment that was deleted."""
        self._refused.pop(key, None)

    async def _create(self, wanted: Manifest) -> str:
        metadata = wanted["metadata"]
        try:
            try:
                await self._client.create(JOBS, wanted)
            except Conflict:
                return self._owned_by_another(
                    await self._client.get(JOBS, metadata["namespace"], metadata["name"]), wanted
                )
        except ClusterError as error:
            return error.sentence
        log.info("created Job %s/%s", metadata["namespace"], metadata["name"])
        return ""

    def _owned_by_another(self, existing: Manifest | None, wanted: Manifest) -> str:
        """Return why a Job that has the name already is not the wanted one; empty if it is."""
        owner = (controller_of(existing["metadata"]) or {}).get("uid") if existing else None
        if existing is None or owner == (controller_of(wanted["metadata"]) or {}).get("uid"):
            return ""
        return f'Job "{wanted["metadata"]["name"]}" exists already and is not of this deployment; delete it'
