"""Step times at loads that may come, with the shapes that would be chosen there: the step model of scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.loads import Load, bucket_of
from specdecode_operator.planning.plan_rows import rows_of
from specdecode_operator.planning.shape_search import ShapeSearch
from specdecode_operator.planning.step_time_model import StepTimeModel
from specdecode_operator.planning.task_bounds import bounds_of, follows
from specdecode_operator.planning.workload import (
    Objective,
    Prompt,
    Request,
    mix_requests,
    prompt_token_seconds,
    tasks_at,
)
from specdecode_operator.state.learned import LearnedState, RowState
from specdecode_worker.contract import Buckets


class Paced(NamedTuple):
    """A step of one load with its best shapes."""

    seconds: float
    tokens: float
    least_tokens: float
    error: float
    """Standard error of log(seconds / tokens)."""
    shapes: str


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of one worker at any number of sequences, which reads prompts in the same steps."""

    model: AcceptanceModel
    times: StepTimeModel
    found: Buckets
    rows: tuple[RowState, ...]
    objective: Objective
    kv_tokens: float | None
    prompt_token_seconds: float
    context_tokens: float
    known: dict[float, Paced] = field(default_factory=dict)

    def __call__(self, sequences: float, prompt_tokens: float) -> Paced:
        """Return the step of ``sequences`` that also reads ``prompt_tokens``."""
        if sequences not in self.known:
            self.known[sequences] = self._decoding(sequences)
        step = self.known[sequences]
        seconds = step.seconds + prompt_tokens * self.prompt_token_seconds
        return step._replace(seconds=seconds, error=step.error * step.seconds / seconds)

    def _decoding(self, sequences: float) -> Paced:
        context = bucket_of(self.found.context, self.context_tokens)
        at = bucket_of(self.found.concurrency, sequences), context
        rows, load = (
            [r for r in self.rows if (r.concurrency, r.context) == at],
            Load(sequences, self.context_tokens, context),
        )
        tasks = tasks_at(self.model, rows, load, self.kv_tokens)
        search = ShapeSearch(self.times, load, tasks, self.objective, mix_requests(self.model.learned))
        free = [row.task for row in rows] if follows(self.model.speculation) else []
        choices = search.best(tuple((row.task, row.shape) for row in rows), free)[2]
        best = min(choices.values(), key=lambda choice: choice.rank)
        error = math.sqrt(best.seconds.relative_variance + search.tokens_variance(best))
        shapes = ", ".join(f"{task} {shape}" for task, shape in best.shapes)
        return Paced(best.seconds.mean, best.tokens, min(best.by_task.values()), error, shapes)


def pace(
    speculation: SpeculationSpec,
    learned: LearnedState,
    found: Buckets,
    request: Request,
    prompt: Prompt,
    *,
    kv_tokens: float | None,
) -> Pace | None:
    """Return the step model, or None while no step was timed."""
    times = StepTimeModel.fit(learned.costs, learned.wander)
    if times is None:
        return None
    rows = tuple(
        row.running(bounds_of(speculation, row.task).nearest(row.shape)) for row in rows_of(speculation, learned, found)
    )
    return Pace(
        AcceptanceModel(learned, speculation),
        times,
        found,
        rows,
        Objective.of(speculation.objective, prompt),
        kv_tokens,
        prompt_token_seconds(learned, times),
        request.context,
    )
