"""Records of a worker: its endpoint, as discovery reports it, and the view of it that placement reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one worker."""

    name: str
    """Name of the pod, or the URL of a worker without Kubernetes. Unique, and stable while the worker lives."""
    admin_url: str
    """Base URL of the admin port, for example ``http://10.0.0.7:8001``."""
    weight: float = 1.0
    """Capacity relative to the other workers, for pods on other hardware."""
    deployment: str = ""
    """Deployment of the pod, where several share the traffic."""
    terminating: bool = False
    """True once the pod is being deleted: it finishes its streams and gets no new ones."""


@dataclass(frozen=True, slots=True)
class PlanTask:
    """Task of a worker's plan."""

    name: str
    match: str | None = None
    """Text in the prompt of requests that belong to the task."""
    draft: str = ""
    """Name of its own draft, if the worker has loaded it; empty for the first draft."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """State of a worker at the moment of a choice."""

    endpoint: Endpoint
    in_flight: int
    """Streams of this router on the worker."""
    reported_requests: int = 0
    """Running and waiting requests in the worker's last report, of all routers."""
    max_num_seqs: int = 0
    """Largest batch of the worker; 0 while unknown."""
    model: str = ""
    """Name of the model in the worker's last report; empty while unknown."""
    compatibility_key: str = ""
    """Key of the last stream's ``Open``; empty while unknown."""
    plan_tasks: tuple[PlanTask, ...] = ()
    """Tasks of the plan in the worker's last report."""
    tasks: frozenset[str] = frozenset()
    """Tasks whose requests are gathered on this worker (``DraftHomes``); empty for all others."""
    speed: float = 1.0
    """Speed of the worker's steps relative to the other workers' (``step_speeds``)."""
    suspect: bool = False
    """True while the worker's frames have stopped, or right after a failed connection."""
