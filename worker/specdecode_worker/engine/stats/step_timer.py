"""Timer of steps and of request-seconds, on the monotonic clock.

It also pads steps to the minimum step time of the synthetic knobs.
"""

from __future__ import annotations

import time

from specdecode_worker.engine.scheduler import Scheduler
from specdecode_worker.engine.stats.statistics import Statistics
from specdecode_worker.engine.step.launched_step import LaunchedStep
from specdecode_worker.speculation.synthetic import Synthetic


class StepTimer:
    """Timer of the steps of one engine."""

    def __init__(self) -> None:
        self._collected_seconds = self._accounted_seconds = time.monotonic()

    def finish(self, step: LaunchedStep, synthetic: Synthetic) -> tuple[float, float]:
        """Finish the timing of a collected step, after sleeping if synthetic knobs require a longer step.

        Returns:
            The step time in seconds, without time spent on earlier steps, and the current time.
        """
        began = max(step.began_seconds, self._collected_seconds)
        least = 0.0
        if synthetic.knobs is not None:
            nodes = max(row.tree.verified - 1 for row in step.rows)
            context = max(row.request.cached for row in step.rows)
            drafts = (row.request.draft.draft for row in step.rows)
            least = synthetic.least_seconds(len(step.rows), nodes, context, drafts)
        now = time.monotonic()
        if now - began < least:
            time.sleep(least - (now - began))
            now = time.monotonic()
        self._collected_seconds = now
        return now - began, now

    def account(self, statistics: Statistics, scheduler: Scheduler, now: float) -> None:
        """Add the time since the last call to the request-seconds of the running and waiting requests."""
        elapsed = now - self._accounted_seconds
        statistics.running_request_seconds += elapsed * len(scheduler.running)
        statistics.waiting_request_seconds += elapsed * len(scheduler.waiting)
        self._accounted_seconds = now
