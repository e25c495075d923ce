"""What to run at which load: estimates of acceptance and step time, and the shape of every row of the plan. Pure."""

from specdecode_operator.planning.bounds import follows, plans
from specdecode_operator.planning.figures import figures, first_acceptance
from specdecode_operator.planning.learn import learn
from specdecode_operator.planning.loads import buckets, present_row
from specdecode_operator.planning.moves import Change
from specdecode_operator.planning.pace import Pace, Request, pace, prompt_of, request_of
from specdecode_operator.planning.plan import next_plan
from specdecode_operator.planning.rows import Chosen, choose

__all__ = [
    "Change",
    "Chosen",
    "Pace",
    "Request",
    "buckets",
    "choose",
    "figures",
    "first_acceptance",
    "follows",
    "learn",
    "next_plan",
    "pace",
    "plans",
    "present_row",
    "prompt_of",
    "request_of",
]
