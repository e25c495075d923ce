"""Observation of one deployment: workload, workers and readings as one input of the decision. Reads caches only."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.controller.caches import Caches
from specdecode_operator.state.deployment_state import Readings, WorkerReading
from specdecode_operator.state.session import Session
from specdecode_operator.types import Key, Observation, Worker


def observe(key: Key, caches: Caches, readings: Readings, session: Session) -> Observation:
    """Return the observation of a deployment. A worker without a report has the reason in ``report_problem``."""
    workers = tuple(with_reading(worker, readings.by_uid.get(worker.uid)) for worker in caches.workers(key))
    return Observation(
        workload=caches.workload(key),
        workers=workers,
        session=session,
        round=readings.round,
        routers=caches.routers(key),
        demand=caches.demand(key),
        jobs=caches.jobs(key),
        jobs_problem=caches.jobs_problem(key),
    )


def with_reading(worker: Worker, reading: WorkerReading | None) -> Worker:
    """Return the worker with its latest reading. Leaving workers and those without an address get none."""
    if worker.leaving or worker.address is None or reading is None:
        return worker
    if reading.report is None:
        return replace(worker, report_problem=reading.problem or "no report")
    return replace(worker, report=reading.report, report_tag=reading.tag, packed_report=reading.baseline)
