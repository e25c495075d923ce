"""Which row of the plan runs: the worker decides nothing here but which bucket it is in."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from specdecode_worker.contract import Buckets, Plan, PlanState, TreeShape


class PlanRefused(ValueError):
    """The plan is not for this worker, or older than the one that runs; the message says which."""


@dataclass(frozen=True, slots=True)
class Load:
    """Where one request stands: bucket indices of the plan, and its task."""

    concurrency: int
    context: int
    task: str


class Dispatcher:
    """Reads plan rows by load, with hysteresis between concurrency buckets."""

    def __init__(self, uid: str, draft_hash: str, plan: Plan | None = None) -> None:
        self.plan = plan or Plan(uid=uid)
        self._uid, self.draft_hash = uid, draft_hash
        self._bucket = 0

    @property
    def matches_draft(self) -> bool:
        return not self.plan.rows or self.plan.draft == self.draft_hash

    @property
    def state(self) -> PlanState:
        plan = self.plan
        return PlanState(
            uid=plan.uid,
            version=plan.version,
            draft=plan.draft,
            matches_draft=self.matches_draft,
            quiet=plan.quiet,
            buckets=plan.buckets,
        )

    def take(self, plan: Plan) -> None:
        """Raises PlanRefused for another deployment's plan, or an older version of this one's."""
        if self._uid and plan.uid != self._uid:
            raise PlanRefused(f"the plan is for uid {plan.uid!r}, this worker belongs to {self._uid!r}")
        if plan.draft == self.plan.draft and plan.uid == self.plan.uid and plan.version < self.plan.version:
            raise PlanRefused(f"plan version {plan.version} is older than {self.plan.version}, which runs")
        self.plan = plan
        self._bucket = min(self._bucket, len(plan.buckets.concurrency))

    def load(self, running: int) -> int:
        """The concurrency bucket of this many running sequences; remembers it for the hysteresis."""
        self._bucket = _with_hysteresis(self.plan.buckets, self._bucket, running)
        return self._bucket

    def context(self, tokens: int) -> int:
        return bisect_left(self.plan.buckets.context, tokens)

    def shape(self, load: Load) -> TreeShape:
        """The plan's shape for this load; ``initial`` where no row says or the draft is not the one planned for."""
        row = self.plan.row(load.concurrency, load.context, load.task) if self.matches_draft else None
        return row.shape if row else self.plan.initial


def _with_hysteresis(buckets: Buckets, current: int, running: int) -> int:
    """Up when an edge is exceeded by the hysteresis, down as soon as the load is at or below the edge."""
    edges = buckets.concurrency
    exact = bisect_left(edges, running)
    if exact <= current:
        return exact
    entered = sum(running > edge * (1 + buckets.hysteresis) for edge in edges)
    return max(current, entered)
