"""Progress of the routers towards the spec, in the terms of progress.py."""

from __future__ import annotations

from specdecode_operator.controller.status.progress import Finding
from specdecode_operator.types import Deployment, Observation


def find_router_motion(deployment: Deployment, observed: Observation) -> Finding | None:
    """Return what is still under way at the routers, or None if all of them serve."""
    wanted, routers = deployment.spec.router.replicas, observed.routers
    if not wanted:
        return None
    if routers is None:
        return Finding("RoutersStarting", "the Deployment of the routers does not exist yet")
    if not deployment.spec.router.autoscaled and routers.wanted != wanted:
        return Finding("RoutersStarting", f"{routers.available} of {wanted} routers are available")
    if routers.settled:
        return None
    counts = f"{routers.updated} of {routers.wanted} routers run the current pod template"
    where = "" if routers.ready else "; until one is ready, the Service selects the workers"
    return Finding("RoutersStarting", f"{counts}, {routers.available} are available{where}")


def find_router_blocker(deployment: Deployment, observed: Observation) -> Finding | None:
    """Return what keeps routers from starting until a person acts, or None."""
    routers = observed.routers
    if routers is None or not deployment.spec.router.replicas or routers.settled:
        return None
    problem = routers.replica_failure or routers.stalled
    return Finding("RoutersFailing", f"Deployment {deployment.name}-router: {problem}") if problem else None
