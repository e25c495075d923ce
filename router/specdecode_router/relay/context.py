"""Parts of a router that all requests share: workers, limits and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdecode_router.relay.silence_monitor import SilenceMonitor
from specdecode_router.settings import RouterSettings
from specdecode_router.telemetry.metrics import RouterMetrics
from specdecode_router.workers.client import WorkerClient
from specdecode_router.workers.registry import WorkerRegistry
from specdecode_router.workers.worker import WorkerView
from specdecode_worker.contract.internal_stream import End


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


class Chooser(Protocol):
    """Choice of the worker of each attempt."""

    def choose(self, views: Sequence[WorkerView], key: str, exclude: frozenset[str]) -> WorkerView | None:
        """Return a worker with the compatibility key (empty for any) that is not excluded; None without one."""

    def record_end(self, worker: str, end: End) -> None:
        """Record which worker ended the request, and what it had cached."""
