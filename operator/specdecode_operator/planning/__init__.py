"""What to run at which load: estimates of acceptance and step time, and the shape of every row of the plan. Pure."""

from specdecode_operator.planning.acceptance_model import lacking
from specdecode_operator.planning.decision_rule import Change
from specdecode_operator.planning.figures import figures, first_acceptance, saved_seconds
from specdecode_operator.planning.learning import learn, learn_first_reports, learn_parked
from specdecode_operator.planning.loads import buckets, present_row
from specdecode_operator.planning.plan_rows import Chosen, basis_of, choose, next_plan, standing, stands, still
from specdecode_operator.planning.step_pace import pace
from specdecode_operator.planning.task_bounds import follows, plans
from specdecode_operator.planning.workload import prompt_of, request_of

__all__ = [
    "Change",
    "Chosen",
    "basis_of",
    "buckets",
    "choose",
    "figures",
    "first_acceptance",
    "follows",
    "lacking",
    "learn",
    "learn_first_reports",
    "learn_parked",
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
