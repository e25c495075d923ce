"""Observation of one deployment: workload, workers and readings as one input of the decision. Reads caches only."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.controller.caches import Caches
from specdecode_operator.state.deployment_state import Readings, WorkerReading
from specdecode_operator.state.session import Session
from specdecode_operator.telemetry.deltas import went_backwards
from specdecode_operator.types import Key, Observation, Worker
from specdecode_worker.contract import Report


def observe(key: Key, caches: Caches, readings: Readings, session: Session) -> Observation:
    """Return the observation of a deployment. A worker without a report has the reason in ``report_problem``."""
    workers = tuple(with_reading(worker, readings.by_uid.get(worker.uid), session) for worker in caches.workers(key))
    return Observation(workload=caches.workload(key), workers=workers, session=session, round=readings.round)


def with_reading(worker: Worker, reading: WorkerReading | None, session: Session) -> Worker:
    """Return the worker with its latest reading. Leaving workers and those without an address get none."""
    if worker.leaving or worker.address is None or reading is None:
        return worker
    if reading.report is None:
        return replace(worker, report_problem=reading.problem or "no report")
    known = session.baselines.get(worker.uid)
    read = replace(worker, report=reading.report, report_tag=reading.tag, packed_report=reading.baseline)
    return without_regression(read, known.report if known else None)


def without_regression(worker: Worker, before: Report | None) -> Worker:
    """Return the worker without its report if a counter fell within one boot, because such a report is wrong.

    ``before`` stays the baseline until the counters have passed it again or the worker restarts.
    """
    report = worker.report
    if report is None or before is None or report.boot_id != before.boot_id:
        return worker
    name = went_backwards(before, report)
    if name is None:
        return worker
    problem = f"{name}: fell from {getattr(before, name):g} to {getattr(report, name):g} within one boot"
    return replace(worker, report=None, packed_report=None, report_problem=problem)
