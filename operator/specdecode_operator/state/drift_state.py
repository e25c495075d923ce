"""Stored drift of a deployment's draft: baseline and detector of each task, as the section `drift` has them. Pure."""

from __future__ import annotations

import math

from pydantic import Field

from specdecode_operator.drafts.baseline import Baseline, LearningBaseline
from specdecode_operator.drafts.chain_cost import ChainCounts
from specdecode_operator.drafts.drift import DriftDetector
from specdecode_operator.state.cells import Stored

ALL_TASKS = ""
"""``task`` of the record of all tasks together, by which a changed mix shows."""
DIGITS = 9
"""Significant digits of the sums. A week adds thousands of values to each; six digits would lose their variance."""


class TaskDrift(Stored):
    """Baseline and detector of one task."""

    task: str
    requests: float = 0.0
    """Finished requests of the batch that is being collected."""
    hits: tuple[float, ...] = ()
    """Accepted tokens of that batch at depths 1, 2 and 3 of the main path."""
    totals: tuple[float, ...] = ()
    """All drafted tokens there."""
    known_hits: tuple[float, ...] = ()
    """Accepted tokens of all batches of the baseline, for the ratios of the depths."""
    known_totals: tuple[float, ...] = ()
    began: float = 0.0
    """Time of the first batch, in seconds since the epoch; 0 before."""
    counts: tuple[float, ...] = ()
    """Batches by half hour of the day while the baseline is learnt, then empty, as the next four fields."""
    sums: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()
    day_counts: tuple[float, ...] = ()
    day_sums: tuple[float, ...] = ()
    costs: tuple[float, ...] = ()
    """Log cost by half hour of the frozen baseline; empty while it is learnt."""
    deviation: float = 0.0
    day_deviation: float = 0.0
    batches_per_month: float = 0.0
    logs: tuple[float, ...] = ()
    """Evidence that the task is slower than its baseline. It stays as it is while the drift lasts."""
    batches: int = 0
    ending_logs: tuple[float, ...] = ()
    """Evidence that the task is as fast as its baseline again, since the drift began."""
    ending_batches: int = 0
    recent: float = 0.0
    """Decayed sum of log cost above the baseline, of the last batches."""
    recent_weight: float = 0.0
    threshold: float = 0.0
    """Evidence at which the alarm is raised: batches between two false ones."""
    since: float = 0.0
    """Time when the drift was found, in seconds since the epoch; 0 without one."""
    steps: float = 0.0
    """Decayed number of decoding steps of the task's sequences."""

    @property
    def is_learning(self) -> bool:
        """True until the baseline is frozen."""
        return not self.costs

    @property
    def counted(self) -> ChainCounts:
        """Counts of the batch that is being collected."""
        return ChainCounts(self.hits, self.totals) if self.hits else ChainCounts()

    @property
    def known(self) -> ChainCounts:
        """Counts of the baseline."""
        return ChainCounts(self.known_hits, self.known_totals) if self.known_hits else ChainCounts()

    @property
    def learning(self) -> LearningBaseline:
        """The baseline that is being learnt."""
        if not self.counts:
            return LearningBaseline()
        days = tuple(zip(self.day_counts, self.day_sums, strict=True))
        return LearningBaseline(self.began, self.counts, self.sums, self.squares, days)

    @property
    def baseline(self) -> Baseline:
        """The frozen baseline."""
        return Baseline(self.costs, self.deviation, self.day_deviation, self.batches_per_month)

    @property
    def detector(self) -> DriftDetector:
        """The detector of a loss."""
        return DriftDetector(self.logs, self.batches) if self.batches else DriftDetector()

    @property
    def ending(self) -> DriftDetector:
        """The detector of the end of a loss."""
        return DriftDetector(self.ending_logs, self.ending_batches) if self.ending_batches else DriftDetector()

    @property
    def excess(self) -> float:
        """Mean log cost above the baseline over the last batches."""
        return self.recent / self.recent_weight if self.recent_weight else 0.0

    @property
    def loss(self) -> float:
        """Share of the speed that is lost against the baseline; negative where the task is faster."""
        return -math.expm1(-self.excess)

    @property
    def evidence(self) -> float:
        """Evidence of the detector over its threshold; 1 raises the alarm."""
        if self.is_learning or not self.batches or self.threshold <= 0:
            return 0.0
        return math.exp(min(50.0, self.detector.log_evidence - math.log(self.threshold)))

    def tokens(self, at: float) -> tuple[float, float]:
        """Return the tokens per step of a chain of three: of the baseline at this time of the day, and now."""
        expected = self.baseline.expected(at)
        return math.exp(-expected), math.exp(-expected - self.excess)

    def with_learning(self, learning: LearningBaseline) -> TaskDrift:
        """Return the record with another state of the baseline that is being learnt."""
        return self.model_copy(
            update={
                "began": learning.began or 0.0,
                "counts": learning.counts,
                "sums": rounded(learning.sums),
                "squares": rounded(learning.squares),
                "day_counts": tuple(count for count, _ in learning.days),
                "day_sums": rounded(tuple(total for _, total in learning.days)),
            }
        )

    def frozen(self, now: float) -> TaskDrift:
        """Return the record with a baseline that is frozen now."""
        baseline = self.learning.freeze(now - self.began)
        empty = dict.fromkeys(("counts", "sums", "squares", "day_counts", "day_sums"), ())
        return self.model_copy(
            update={
                **empty,
                "costs": rounded(baseline.costs),
                "deviation": baseline.deviation,
                "day_deviation": baseline.day_deviation,
                "batches_per_month": baseline.batches_per_month,
            }
        )


class DriftState(Stored):
    """Drift of one draft on one target in one image."""

    draft: str = ""
    target: str = ""
    image: str = ""
    began: float = 0.0
    """Time from which these three hold, in seconds since the epoch."""
    renewed: str = ""
    """Change that began a new baseline; empty for the first one."""
    tasks: tuple[TaskDrift, ...] = Field(default=(), max_length=32)
    decode_seconds: float = 0.0
    """Decayed sum of the seconds of decoding steps, all workers together."""
    decode_days: float = 0.0
    """Decayed days in which they were counted."""
    at: float = 0.0
    """Time of the last measurement."""
    run_seconds: float = 0.0
    """Device seconds of the last training run; 0 before the first. It is a copy of the rollout's, for the worth."""
    recovery: float | None = None
    """Share of the loss that the last run recovered, likewise."""
    schedule: str = ""
    """Schedule of the spec that ``scheduled_from`` belongs to."""
    scheduled_from: float = 0.0
    """Time after which the next time of the schedule counts."""

    def task(self, name: str) -> TaskDrift:
        """Return the record of a task; a new one if there is none."""
        return next((task for task in self.tasks if task.task == name), TaskDrift(task=name))

    @property
    def own_tasks(self) -> tuple[TaskDrift, ...]:
        """Records of single tasks."""
        return tuple(task for task in self.tasks if task.task != ALL_TASKS)

    @property
    def watched(self) -> tuple[TaskDrift, ...]:
        """Tasks with a baseline."""
        return tuple(task for task in self.own_tasks if not task.is_learning)

    @property
    def stale(self) -> tuple[TaskDrift, ...]:
        """Tasks that became slower."""
        return tuple(task for task in self.own_tasks if task.since)

    @property
    def mix(self) -> TaskDrift | None:
        """Record of all tasks together if they became slower and no task did."""
        return None if self.stale else next((one for one in self.tasks if one.task == ALL_TASKS and one.since), None)


def rounded(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return the values at DIGITS significant digits."""
    return tuple(float(f"{value:.{DIGITS}g}") for value in values)
