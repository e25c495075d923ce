"""What to run at which load: estimates of acceptance and step time, and the depth of every row of the plan. Pure."""

from specdecode_operator.planning.figures import figures, first_acceptance
from specdecode_operator.planning.learn import learn
from specdecode_operator.planning.loads import buckets, present_row
from specdecode_operator.planning.plan import next_plan
from specdecode_operator.planning.rows import Chosen, choose

__all__ = ["Chosen", "buckets", "choose", "figures", "first_acceptance", "learn", "next_plan", "present_row"]
