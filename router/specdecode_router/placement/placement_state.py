"""Memory of the placement: what earlier requests of this router showed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specdecode_router.placement.choose import Placement, place
from specdecode_router.placement.draft_homes import DraftHomes
from specdecode_router.placement.prefix_table import PrefixTable
from specdecode_router.placement.traffic_split import TrafficSplit


@dataclass(slots=True)
class PlacementState:
    """Parts of the placement that all requests of a router share."""

    prefixes: PrefixTable = field(default_factory=PrefixTable)
    homes: DraftHomes = field(default_factory=DraftHomes)
    policy: Callable[..., Placement | None] = place
    """Choice of the worker of a request. Benchmarks compare ``place`` with others."""
    split: TrafficSplit = field(default_factory=TrafficSplit)
    """Shares of deployments. They are replaced when settings change."""
