"""Mount problems of pods, read from their Events: the status of a pod does not have them."""

from __future__ import annotations

import logging
from dataclasses import replace

from specdecode_operator.errors import ClusterError
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.pod_events import mount_problem
from specdecode_operator.types import Observation, TrainingJob, Worker

MIN_AGE_SECONDS = 15.0
"""Age above which a scheduled pod without an address is checked. Younger pods are still being set up."""
MAX_PODS = 3
"""Number of pods whose Events are read in one reconcile. Pods of one template fail for the same reason."""

log = logging.getLogger(__name__)


async def add_mount_problems(client: KubeClient, namespace: str, observed: Observation, now: float) -> Observation:
    """Return the observation with the mount problems of pods that do not start, of workers and of training Jobs."""
    observed = replace(
        observed, jobs=tuple([await _with_problem(client, namespace, job, now) for job in observed.jobs])
    )
    waiting = [worker for worker in observed.workers if _is_waiting(worker, now)][:MAX_PODS]
    if not waiting:
        return observed
    troubles: dict[str, str | None] = {}
    for worker in waiting:
        try:
            troubles[worker.uid] = await mount_problem(client, namespace, worker.uid)
        except ClusterError as error:
            log.info("%s/%s: its Events cannot be read: %s", namespace, worker.name, error)
    workers = tuple(
        replace(worker, trouble=troubles[worker.uid]) if worker.uid in troubles else worker
        for worker in observed.workers
    )
    return replace(observed, workers=workers)


async def _with_problem(client: KubeClient, namespace: str, job: TrainingJob, now: float) -> TrainingJob:
    if not job.waiting_pod or now - job.waiting_since <= MIN_AGE_SECONDS:
        return job
    try:
        problem = await mount_problem(client, namespace, job.waiting_pod)
    except ClusterError as error:
        log.info("%s/%s: Events of its pod cannot be read: %s", namespace, job.name, error)
        return job
    return replace(job, status=replace(job.status, reason=problem or ""))


def _is_waiting(worker: Worker, now: float) -> bool:
    """Return whether a scheduled pod has no address for too long and its status does not say why."""
    if not worker.placed or worker.ready or worker.leaving or worker.trouble or worker.address:
        return False
    return worker.created_at is not None and now - worker.created_at > MIN_AGE_SECONDS
