"""Workers that are ready and send no report: counted from look to look, stale after a while. Pure; used by decide."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.state.session import Session, Silence
from specdecode_operator.types import Observation, Worker

STALE_SECONDS, STALE_LOOKS = 30.0, 3
"""A worker without a report for so long and so often is stale; one missed report is nothing."""


def counted(observed: Observation, now: float) -> dict[str, Silence]:
    """Ready workers that say nothing in this look, by uid, with how long that has been so."""
    known = observed.session.silent
    quiet = [worker for worker in observed.workers if worker.ready and not worker.leaving and worker.report is None]
    return {worker.uid: _longer(known.get(worker.uid), worker, now) for worker in quiet}


def stale(observed: Observation, memory: Session, now: float) -> dict[str, str]:
    """Names of workers whose reports are stale, and why."""
    return {
        worker.name: silence.problem
        for worker in observed.workers
        if (silence := memory.silent.get(worker.uid)) is not None
        and silence.looks >= STALE_LOOKS
        and now - silence.since >= STALE_SECONDS
    }


def _longer(known: Silence | None, worker: Worker, now: float) -> Silence:
    if known is None:
        return Silence(since=now, looks=1, problem=worker.report_problem or "no report")
    return replace(known, looks=known.looks + 1)
