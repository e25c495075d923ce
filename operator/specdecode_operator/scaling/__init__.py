"""The replica decision: capacity of one worker, demand, bounds, and workers that cannot be placed. Pure."""

from specdecode_operator.scaling.capacity import Limits, Mix, StepEstimate, StepModel, arrival_rate, arrivals, capacity
from specdecode_operator.scaling.idleness import Activity, activity_of, scale_to_activity
from specdecode_operator.scaling.replicas import (
    Demand,
    Placement,
    ScaleResult,
    ServiceLoad,
    is_complete,
    placement_of,
    placement_problem,
    scale,
    scaling_limit,
    take_over,
    withdrawal_message,
)
from specdecode_operator.scaling.tuning import TUNING, Tuning
