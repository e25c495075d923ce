"""Start-up time of a worker, from the pods that are ready."""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_operator.scaling.tuning import TUNING
from specdecode_operator.types import Worker


def update_startup_seconds(smoothed: float | None, workers: Iterable[Worker]) -> float | None:
    """Return the smoothed start-up time in seconds. Return None until one was measured.

    The quickest worker counts: one that lost readiness and became ready again looks like a slow start.
    """
    measured = [worker.startup_seconds for worker in workers if worker.startup_seconds is not None]
    if measured:
        latest = min(measured)
        smoothed = latest if smoothed is None else smoothed + TUNING.startup_weight * (latest - smoothed)
    return smoothed and float(f"{smoothed:.3g}")
