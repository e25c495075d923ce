"""Parts of a router that all requests share: workers, limits and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdecode_router.relay.silence_monitor import SilenceMonitor
from specdecode_router.settings import RouterSettings
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry


@dataclass(slots=True)
class RelayContext:
    """Parts of a router that all requests share."""

    workers: WorkerRegistry
    client: WorkerClient
    monitor: SilenceMonitor
    limits: RouterSettings
    """Bounds of the requests that begin now. They are replaced when settings change."""
    metrics: RouterMetrics
    clock: Callable[[], float]
    """Monotonic clock in seconds."""
