"""Step times at loads that may come, with the shapes that would be chosen there: the step model of scaling."""

from __future__ import annotations

import math
from functools import cache

from specdecode_operator.api.v1alpha1 import SpeculationSpec
from specdecode_operator.planning.acceptance_model import AcceptanceModel
from specdecode_operator.planning.loads import Load, bucket_of, present_row
from specdecode_operator.planning.plan_rows import rows_of
from specdecode_operator.planning.shape_search import RANK, ShapeSearch
from specdecode_operator.planning.step_time_model import Batch, StepTimeModel
from specdecode_operator.planning.task_bounds import bounds_of, follows
from specdecode_operator.planning.workload import Objective, Request, prompt_token_seconds, tasks_at
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.types import StepEstimate, StepModel
from specdecode_worker.contract import Buckets, TreeShape


def drafting_share(
    speculation: SpeculationSpec, learned: LearnedState, found: Buckets, shape: TreeShape, max_num_seqs: int
) -> float | None:
    """Return the share of a step at the present load that draft passes surely take. None where nothing was timed."""
    times, at = StepTimeModel.fit(learned.costs, learned.wander), present_row(learned.load, found)
    if times is None or not shape.nodes:
        return None
    load = times.typical(found, *at, max_num_seqs)
    passes = bounds_of(speculation, learned.load.task).passes(shape.depth)
    return times.drafting_share(load, Batch(passes, 1 + shape.nodes)) if times.near(load) else None


def pace(
    speculation: SpeculationSpec,
    learned: LearnedState,
    found: Buckets,
    request: Request,
    objective: Objective,
    *,
    kv_tokens: float | None,
) -> StepModel | None:
    """Return the step model, or None while no step was timed."""
    times, model = StepTimeModel.fit(learned.costs, learned.wander), AcceptanceModel(learned, speculation)
    if times is None:
        return None
    per_prompt_token, context = prompt_token_seconds(learned, times), bucket_of(found.context, request.context)
    rows = [
        row.running(bounds_of(speculation, row.task).nearest(row.shape))
        for row in rows_of(speculation, learned, found)
        if row.context == context
    ]

    @cache
    def decoding(sequences: float) -> StepEstimate:
        here = [row for row in rows if row.concurrency == bucket_of(found.concurrency, round(sequences))]
        load = Load(sequences, request.context, context)
        tasks = tasks_at(model, here, load, kv_tokens)
        search = ShapeSearch(times, load, tasks, objective)
        free = [row.task for row in here] if follows(speculation) else []
        best = min(search.best(tuple((row.task, row.shape) for row in here), free)[2], key=RANK)
        error = math.sqrt(best.seconds.relative_variance + search.tokens_variance(best))
        return StepEstimate(best.seconds.mean, best.tokens, min(best.by_task.values()), error)

    def step(sequences: float, prompt_tokens: float) -> StepEstimate:
        decoded = decoding(sequences)
        seconds = decoded.seconds + prompt_tokens * per_prompt_token
        return decoded._replace(seconds=seconds, error=decoded.error * decoded.seconds / seconds)

    return step
