"""Choice of a row of the plan by load, context and task."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from specdecode_worker.contract import OTHER_TASK, Buckets, Plan, PlanState, TreeShape

# Selection of the plan row for a load. The only decision made here is the bucket of the load.


class PlanRefused(ValueError):
    """Error for a plan of another deployment, or of an older version than the current plan."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bucket indices of concurrency and context in the plan, and the task of a request."""

    concurrency: int
    context: int
    task: str


class Dispatcher:
    """Current plan of a worker, read by load with hysteresis between concurrency buckets."""

    def __init__(self, uid: str, draft_hash: str, plan: Plan | None = None) -> None:
        self.plan = plan or Plan(uid=uid)
        self._shapes = _shapes_of(self.plan)
        self._uid, self.draft_hash = uid, draft_hash
        self.accepts_any_draft = False
        """True during a draft trial, whose two drafts both run the rows of the plan, as all other workers do."""
        self._concurrency_bucket = 0

    @property
    def matches_draft(self) -> bool:
        """True if the plan has no rows, or its rows apply to the loaded draft."""
        return not self.plan.rows or self.accepts_any_draft or self.plan.draft == self.draft_hash

    @property
    def state(self) -> PlanState:
        """Summary of the current plan for the report."""
        plan = self.plan
        return PlanState(
            uid=plan.uid,
            version=plan.version,
            draft=plan.draft,
            matches_draft=self.matches_draft,
            quiet=plan.quiet,
            buckets=plan.buckets,
            tasks=plan.tasks,
        )

    def set_plan(self, plan: Plan) -> None:
        """Replace the current plan.

        Raises:
            PlanRefused: The plan is for another deployment, or is an older version of this deployment's plan.
        """
        if self._uid and plan.uid != self._uid:
            raise PlanRefused(f"the plan is for uid {plan.uid!r}, this worker belongs to {self._uid!r}")
        if plan.draft == self.plan.draft and plan.uid == self.plan.uid and plan.version < self.plan.version:
            raise PlanRefused(f"plan version {plan.version} is older than {self.plan.version}, which runs")
        self.plan, self._shapes = plan, _shapes_of(plan)
        self._concurrency_bucket = min(self._concurrency_bucket, len(plan.buckets.concurrency))

    def load(self, running: int) -> int:
        """Return the concurrency bucket of ``running`` sequences, and remember it for the hysteresis."""
        self._concurrency_bucket = _with_hysteresis(self.plan.buckets, self._concurrency_bucket, running)
        return self._concurrency_bucket

    def context(self, tokens: int) -> int:
        """Return the context bucket of a length in tokens. Edges are inclusive."""
        return bisect_left(self.plan.buckets.context, tokens)

    def shape(self, load: Load) -> TreeShape:
        """Return the planned shape for this load, or ``initial`` without a row or with another draft than planned."""
        if not self.matches_draft:
            return self.plan.initial
        shape = self._shapes.get(load)
        if shape is None:
            shape = self._shapes.get(Load(load.concurrency, load.context, OTHER_TASK))
        return self.plan.initial if shape is None else shape


def _shapes_of(plan: Plan) -> dict[Load, TreeShape]:
    """Return the shapes of the rows by load, which a step looks up faster than in up to 512 rows."""
    return {Load(row.concurrency, row.context, row.task): row.shape for row in plan.rows}


def _with_hysteresis(buckets: Buckets, current: int, running: int) -> int:
    """Return the next bucket: a higher one only if its edge is exceeded by the hysteresis, a lower one at once."""
    edges = buckets.concurrency
    exact = bisect_left(edges, running)
    if exact <= current:
        return exact
    entered = sum(running > edge * (1 + buckets.hysteresis) for edge in edges)
    return max(current, entered)


# Plain step time as a function of the number of sequences, as measured at start.
#
# A bucket of the plan covers several numbers of sequences, and drafts change their distribution, because requests end
# at different times. Without a correction, drafts would appear faster than they are. Step times are therefore scaled to
# the upper edge of the bucket before they are compared.


class PlainStepTimes:
    """Piecewise linear step time by number of sequences, extrapolated beyond the measured points.

    With fewer than two points the curve is constant.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []

    def learn(self, sequences: int, seconds: float) -> None:
        """Set the step time in seconds for this number of sequences."""
        others = [point for point in self._points if point[0] != sequences]
        self._points = sorted([*others, (sequences, seconds)])

    def scaled(self, seconds: float, sequences: float, edge: int) -> float:
        """Scale the ``seconds`` of a step of ``sequences`` to a step of ``edge`` sequences.

        ``sequences`` may be the mean of several steps.
        """
        before, after = self._at(sequences), self._at(edge)
        return seconds * after / before if before > 0 and after > 0 else seconds

    def _at(self, sequences: float) -> float:
        points = self._points
        if len(points) < 2:
            return 1.0
        right = min(max(bisect_left(points, (sequences, 0.0)), 1), len(points) - 1)
        (low, least), (high, most) = points[right - 1 : right + 1]
        return least + (most - least) * (sequences - low) / (high - low)
