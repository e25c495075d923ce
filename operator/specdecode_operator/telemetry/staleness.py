"""Ready workers without a report: counted by rounds of the scraper, stale after a while. Pure.

Only rounds count. Planner ticks between two rounds see the same ``Readings`` and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specdecode_operator.state.session import Session, Silence
from specdecode_operator.types import Observation, Worker

if TYPE_CHECKING:
    from specdecode_operator.state.deployment_state import Readings

STALE_SECONDS, STALE_LOOKS = 30.0, 3
"""A worker is stale after this time and this many rounds without a report. One missed report means nothing."""


@dataclass(frozen=True, slots=True)
class SilentWorker:
    """Ready worker without a report since some round."""

    since: float
    """End of the first round without a report, in seconds since the epoch."""
    first_round: int
    """Number of that round."""
    problem: str
    """Reason of the first round. Later ones may differ in every number, and status is written on change."""


def silent_workers(
    workers: Iterable[Worker], readings: Readings, known: Mapping[str, SilentWorker]
) -> dict[str, SilentWorker]:
    """Return the ready workers without a report in the latest round, by uid of the pod.

    Args:
        workers: Pods of the deployment.
        readings: Result of the latest round. Before the first round no worker is silent.
        known: Result of this function for the previous readings.
    """
    if readings.round == 0:
        return {}
    silent: dict[str, SilentWorker] = {}
    for worker in workers:
        reading = readings.by_uid.get(worker.uid)
        if worker.ready and not worker.leaving and (reading is None or reading.problem is not None):
            problem = (reading.problem if reading else None) or "no report"
            first = SilentWorker(readings.at, readings.round, problem)
            silent[worker.uid] = known.get(worker.uid, first)
    return silent


def stale_workers(workers: Iterable[Worker], readings: Readings, silent: Mapping[str, SilentWorker]) -> dict[str, str]:
    """Return the names of the workers whose reports are stale, with the reason."""
    return {
        worker.name: silent[worker.uid].problem
        for worker in workers
        if worker.uid in silent and _is_stale(silent[worker.uid], readings)
    }


def _is_stale(silent: SilentWorker, readings: Readings) -> bool:
    rounds = readings.round - silent.first_round + 1
    return rounds >= STALE_LOOKS and readings.at - silent.since >= STALE_SECONDS


# --- by looks: until the planner reads ``Readings`` -------------------------------------------------------------------


def counted(observed: Observation, now: float) -> dict[str, Silence]:
    """Return the ready workers without a report in this look, by uid, with the time since when."""
    known = observed.session.silent
    silent = [worker for worker in observed.workers if worker.ready and not worker.leaving and worker.report is None]
    return {worker.uid: _longer(known.get(worker.uid), worker, now) for worker in silent}


def stale(observed: Observation, session: Session, now: float) -> dict[str, str]:
    """Return the names of the workers whose reports are stale, with the reason."""
    return {
        worker.name: silence.problem
        for worker in observed.workers
        if (silence := session.silent.get(worker.uid)) is not None
        and silence.looks >= STALE_LOOKS
        and now - silence.since >= STALE_SECONDS
    }


def _longer(known: Silence | None, worker: Worker, now: float) -> Silence:
    if known is None:
        return Silence(since=now, looks=1, problem=worker.report_problem or "no report")
    return replace(known, looks=known.looks + 1)
