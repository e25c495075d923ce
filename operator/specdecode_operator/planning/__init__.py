"""What to run at which load: estimates of acceptance and step time, and the shape of every row of the plan. Pure."""

from specdecode_operator.planning.bounds import follows, plans
from specdecode_operator.planning.figures import figures, first_acceptance, saved_seconds
from specdecode_operator.planning.learn import learn, learn_parked
from specdecode_operator.planning.loads import buckets, present_row
from specdecode_operator.planning.look import Change
from specdecode_operator.planning.meet import meet
from specdecode_operator.planning.pace import Pace, Request, pace, prompt_of, request_of
from specdecode_operator.planning.plan import next_plan
from specdecode_operator.planning.rows import Chosen, choose
from specdecode_operator.planning.standing import basis_of, standing, stands, still

__all__ = [
    "Change",
    "Chosen",
    "Pace",
    "Request",
    "basis_of",
    "buckets",
    "choose",
    "figures",
    "first_acceptance",
    "follows",
    "learn",
    "learn_parked",
    "meet",
    "next_plan",
    "pace",
    "plans",
    "present_row",
    "prompt_of",
    "request_of",
    "saved_seconds",
    "standing",
    "stands",
    "still",
]
