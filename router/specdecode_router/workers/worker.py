"""Records of a worker: its endpoint, as discovery reports it, and the view of it that placement reads."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.contract.internal_stream import PlanTask


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one worker."""

    name: str
    """Name of the pod, or the URL of a worker without Kubernetes. Unique, and stable while the worker lives."""
    admin_url: str
    """Base URL of the admin port, for example ``http://10.0.0.7:8001``."""
    deployment: str = ""
    """Deployment of the pod, where several share the traffic."""
    terminating: bool = False
    """True once the pod is being deleted: it finishes its streams and gets no new ones."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """State of a worker at the moment of a choice."""

    endpoint: Endpoint
    in_flight: int
    """Streams of this router on the worker."""
    requests: int = 0
    """Running and waiting requests of all routers, as estimated from the worker's last load."""
    max_num_seqs: int = 0
    """Largest batch of the worker; 0 while unknown."""
    model: str = ""
    """Name of the model in the worker's last load; empty while unknown."""
    compatibility_key: str = ""
    """Key of the last stream's ``Open``; empty while unknown."""
    plan_tasks: tuple[PlanTask, ...] = ()
    """Tasks of the plan in the worker's last load."""
    tasks: frozenset[str] = frozenset()
    """Tasks whose requests are gathered on this worker (``DraftHomes``); empty for all others."""
    speed: float = 1.0
    """Speed of the worker's steps relative to the other workers' (``step_speeds``)."""
    suspect: bool = False
    """True while the worker's frames have stopped, or right after a failed connection."""
