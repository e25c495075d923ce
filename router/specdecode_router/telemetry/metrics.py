"""Metrics of the router on /metrics, with vLLM's names where it has an equivalent."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

MAX_TENANTS = 32
"""Tenants with series of their own; further ones share ``other``. The worker has the same bound for API keys."""
OTHER_TENANT = "other"

_ADDED_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
"""The objective for added latency is 10 ms."""
_QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 5, 10, 30, 60)


class Stage(StrEnum):
    """Part of a request's way through the router that adds latency. Time in the queue has a histogram of its own."""

    receive = "receive"
    """From the last byte of the request to its place in the queue: authentication, parsing, limits."""
    place = "place"
    """Choice of a worker."""
    connect = "connect"
    """From the choice to the request being sent to the worker."""
    write = "write"
    """From the receipt of a frame to the write to the client."""


class ResumeReason(StrEnum):
    """Reason why a request continued on another worker."""

    connection = "connection"
    """The connection failed or ended without a last frame."""
    moved = "moved"
    """The worker drains."""
    silence = "silence"
    """The worker's frames stopped."""
    error = "error"
    """The worker answered with an error that another worker may not have."""


class ResumeOutcome(StrEnum):
    """End of an attempt to continue a request."""

    resumed = "resumed"
    failed = "failed"
    """No worker continued it in time, and the client got an error."""
    cancelled = "cancelled"
    """The client left, or the deadline passed."""


class HedgeOutcome(StrEnum):
    """End of a second attempt next to one whose worker was suspected."""

    won = "won"
    """The second attempt delivered the next token first."""
    lost = "lost"
    """The first attempt did: the suspicion was false."""
    failed = "failed"
    """Neither did."""


class RouterMetrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._tenants: set[str] = set()
        self._added_latency = Histogram(
            "specdecode_router_added_latency_seconds",
            "time that the router adds to a request, by stage",
            ["stage"],
            buckets=_ADDED_SECONDS,
            registry=registry,
        )
        # A label lookup costs more than an observation, and `write` is observed for each frame.
        self._added = {stage: self._added_latency.labels(stage).observe for stage in Stage}
        self._queue_time = Histogram(
            "specdecode_router_request_queue_time_seconds",
            "time of a request in the queue, held ones included",
            buckets=_QUEUE_SECONDS,
            registry=registry,
        )
        self._running = Gauge(
            "specdecode_router_num_requests_running", "requests that are answered now", registry=registry
        )
        self._waiting = Gauge("specdecode_router_num_requests_waiting", "requests in the queue", registry=registry)
        self._held = Gauge("specdecode_router_num_requests_held", "requests held without a worker", registry=registry)
        self._oldest_held = Gauge(
            "specdecode_router_oldest_held_seconds", "age of the oldest held request", registry=registry
        )
        self._workers = Gauge("specdecode_router_workers", "known workers by state", ["state"], registry=registry)
        self._requests = Counter(
            "specdecode_router_requests",
            "finished requests by tenant and status",
            ["tenant", "code"],
            registry=registry,
        )
        self._deployments = Counter(
            "specdecode_router_deployment_requests",
            "finished requests that were given to a worker, by its deployment and status",
            ["deployment", "code"],
            registry=registry,
        )
        self._refused = Counter(
            "specdecode_router_requests_refused", "requests without a place, by reason", ["reason"], registry=registry
        )
        self._placements = Counter(
            "specdecode_router_placements", "choices of a worker by outcome", ["outcome"], registry=registry
        )
        self._resumes = Counter(
            "specdecode_router_resumes", "continuations on another worker", ["reason", "outcome"], registry=registry
        )
        self._gap = Histogram(
            "specdecode_router_resume_gap_seconds",
            "time between the last token before a continuation and the first one after it",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self._hedges = Counter(
            "specdecode_router_hedges",
            "second attempts next to a suspected worker, by outcome",
            ["outcome"],
            registry=registry,
        )
        self._create_children()

    def _create_children(self) -> None:
        """Export counters from 0 on: a rate needs a value before the first event."""
        for reason in ResumeReason:
            for outcome in ResumeOutcome:
                self._resumes.labels(reason, outcome)
        for hedge in HedgeOutcome:
            self._hedges.labels(hedge)

    def set_queue(self, *, waiting: int, held: int, oldest_held_seconds: float) -> None:
        """Set the gauges of the admission queue."""
        self._waiting.set(waiting)
        self._held.set(held)
        self._oldest_held.set(oldest_held_seconds)

    def observe_added_latency(self, stage: Stage, seconds: float) -> None:
        """Record time that the router added to a request."""
        self._added[stage](seconds)

    def observe_queue_time(self, seconds: float) -> None:
        """Record the time that a request waited for its place."""
        self._queue_time.observe(seconds)

    def running_request(self) -> AbstractContextManager[None]:
        """Count a request as running while the block runs."""
        return self._running.track_inprogress()

    def set_workers(self, counts: Mapping[str, int]) -> None:
        """Set the number of workers in each state."""
        for state, count in counts.items():
            self._workers.labels(state).set(count)

    def count_request(self, tenant: str, status: int, deployment: str = "") -> None:
        """Count a finished request.

        Args:
            tenant: Name of the tenant; empty without authentication, which is none of the ``MAX_TENANTS``.
            status: HTTP status of the answer; 499 if the client left before.
            deployment: Deployment of the last worker; empty if no worker got the request.
        """
        if tenant and tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANT
        self._requests.labels(tenant, str(status)).inc()
        if deployment:
            self._deployments.labels(deployment, str(status)).inc()

    def count_refusal(self, reason: str) -> None:
        """Count a request without a place. ``reason`` is that of the ``Refused`` error."""
        self._refused.labels(reason).inc()

    def count_placement(self, outcome: str) -> None:
        """Count a choice of a worker. ``outcome`` is that of the ``Placement``."""
        self._placements.labels(outcome).inc()

    def count_resume(self, reason: ResumeReason, outcome: ResumeOutcome, gap_seconds: float | None = None) -> None:
        """Count a continuation on another worker.

        Args:
            reason: Reason for it.
            outcome: End of it.
            gap_seconds: Time without a token for the client, if it was resumed.
        """
        self._resumes.labels(reason, outcome).inc()
        if gap_seconds is not None:
            self._gap.observe(gap_seconds)

    def count_hedge(self, outcome: HedgeOutcome) -> None:
        """Count a second attempt when it is decided which of both attempts goes on."""
        self._hedges.labels(outcome).inc()

    def exposition(self) -> bytes:
        """Return the text of /metrics."""
        return generate_latest(self.registry)
