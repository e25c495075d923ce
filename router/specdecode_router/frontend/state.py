"""Parts of one router that its routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdecode_router.frontend.lifecycle import Lifecycle
from specdecode_router.placement.placement_state import PlacementState
from specdecode_router.queueing.admission import Admission
from specdecode_router.queueing.tenants import TenantTable
from specdecode_router.relay.context import RelayContext
from specdecode_router.settings import RouterSettings
from specdecode_worker.http_edge import BodyBudget


@dataclass(frozen=True, slots=True)
class RouterState:
    """Parts of one router that its routes use."""

    settings: RouterSettings
    relay: RelayContext
    admission: Admission
    tenants: TenantTable
    placement: PlacementState
    lifecycle: Lifecycle
    bodies: BodyBudget
    clock: Callable[[], float]
    """Monotonic clock in seconds."""
