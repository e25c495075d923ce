"""The replica decision: capacity of one worker, demand, bounds, and workers that cannot be placed. Pure."""

from specdecode_operator.scaling.capacity import Limits, Mix, StepEstimate, StepModel, capacity
from specdecode_operator.scaling.demand import arrival_rate, arrivals
from specdecode_operator.scaling.forecast import forecast_rate, update_forecast
from specdecode_operator.scaling.idleness import Activity, activity_of, scale_to_activity
from specdecode_operator.scaling.limits import placement_problem, scaling_limit
from specdecode_operator.scaling.ownership import take_over
from specdecode_operator.scaling.placement import Placement, is_complete, placement_of, withdrawal_message
from specdecode_operator.scaling.replicas import Demand, ScaleResult, ServiceLoad, scale
from specdecode_operator.scaling.startup import update_startup_seconds
from specdecode_operator.scaling.tuning import TUNING, Tuning

__all__ = [
    "TUNING",
    "Activity",
    "Demand",
    "Limits",
    "Mix",
    "Placement",
    "ScaleResult",
    "ServiceLoad",
    "StepEstimate",
    "StepModel",
    "Tuning",
    "activity_of",
    "arrival_rate",
    "arrivals",
    "capacity",
    "forecast_rate",
    "is_complete",
    "placement_of",
    "placement_problem",
    "scale",
    "scale_to_activity",
    "scaling_limit",
    "take_over",
    "update_forecast",
    "update_startup_seconds",
    "withdrawal_message",
]
