"""What steps took and who waited meanwhile, on the monotonic clock; pads steps where a synthetic knob says so."""

from __future__ import annotations

import time

from specdecode_worker.engine.scheduler import Scheduler
from specdecode_worker.engine.stats.statistics import Statistics
from specdecode_worker.engine.step.launched_step import Launched
from specdecode_worker.speculation.synthetic import Synthetic


class Meter:
    """One per engine."""

    def __init__(self) -> None:
        self._collected_seconds = self._accounted_seconds = time.monotonic()

    def finish(self, step: Launched, synthetic: Synthetic) -> tuple[float, float]:
        """(seconds that the step took, now)."""
        began = max(step.began_seconds, self._collected_seconds)
        nodes = max(row.tree.verified - 1 for row in step.rows)
        context = max(row.request.cached for row in step.rows)
        least = synthetic.least_seconds(len(step.rows), nodes, context)
        now = time.monotonic()
        if now - began < least:
            time.sleep(least - (now - began))
            now = time.monotonic()
        self._collected_seconds = now
        return now - began, now

    def account(self, statistics: Statistics, scheduler: Scheduler, now: float) -> None:
        """Request-seconds, up to now, of what was running and waiting until now."""
        elapsed = now - self._accounted_seconds
        statistics.running_request_seconds += elapsed * len(scheduler.running)
        statistics.waiting_request_seconds += elapsed * len(scheduler.waiting)
        self._accounted_seconds = now
