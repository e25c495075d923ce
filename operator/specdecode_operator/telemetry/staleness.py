"""Ready workers without a report: counted by rounds of readings, stale after a while. Pure."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.state.session import Session, Silence
from specdecode_operator.types import Observation, Worker

STALE_SECONDS, STALE_LOOKS = 30.0, 3
"""A worker is stale after this time and this many rounds without a report. One missed report means nothing."""


def counted(observed: Observation, now: float) -> dict[str, Silence]:
    """Return the ready workers without a report in this round, by uid, with the time since when."""
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
