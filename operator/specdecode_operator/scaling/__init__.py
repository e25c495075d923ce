"""The replica decision: capacity of one worker, demand and bounds. Pure."""

from specdecode_operator.scaling.capacity import Limits, Mix, WorkerModel, arrival_rate, arrivals
from specdecode_operator.scaling.replicas import (
    Activity,
    Demand,
    Scaled,
    ServiceLoad,
    activity_of,
    is_complete,
    placement_problem,
    scale,
    scale_to_activity,
    scaling_limit,
    take_over,
)
from specdecode_operator.scaling.tuning import TUNING, Tuning
