"""The replica decision: capacity of one worker, demand, bounds, and workers that cannot be placed. Pure."""

from specdecode_operator.scaling.capacity import Limits, Mix, StepEstimate, StepModel, arrival_rate, arrivals, capacity
from specdecode_operator.scaling.replicas import (
    Activity,
    Demand,
    Placement,
    ScaleResult,
    ServiceLoad,
    activity_of,
    is_complete,
    placement_of,
    placement_problem,
    scale,
    scale_to_activity,
    scaling_limit,
    take_over,
    withdrawal_message,
)
from specdecode_operator.scaling.tuning import TUNING, Tuning
