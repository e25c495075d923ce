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
    terminating: bool = False
    """True once the pod is being deleted: it finishes its streams and gets no new ones."""


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
    compatibility_key: str = ""
    """Key of the last stream's ``Open``; empty while unknown."""
    tasks: frozenset[str] = frozenset()
    """Tasks that the plan assigns to this worker; empty for all."""
    suspect: bool = False
    """True while the worker's frames have stopped, or right after a failed connection."""
