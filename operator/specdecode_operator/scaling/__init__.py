"""How many workers: demand against what one can carry, up soon, down late, never on doubtful numbers. Pure."""

from specdecode_operator.scaling.capacity import Limits, Mix, capacity
from specdecode_operator.scaling.demand import RECENT_SECONDS, arrival_rate, arrivals
from specdecode_operator.scaling.forecast import expected_rate, observed
from specdecode_operator.scaling.limits import deletion_costs, limited
from specdecode_operator.scaling.replicas import Carried, Demand, Scaled, scale

__all__ = [
    "RECENT_SECONDS",
    "Carried",
    "Demand",
    "Limits",
    "Mix",
    "Scaled",
    "arrival_rate",
    "arrivals",
    "capacity",
    "deletion_costs",
    "expected_rate",
    "limited",
    "observed",
    "scale",
]
