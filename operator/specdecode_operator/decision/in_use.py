"""The shapes that workers run at the present load, as status and metrics show them. Pure."""

from __future__ import annotations

from collections.abc import Collection

from specdecode_operator.planning import loads
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.types import Deployment, Observation
from specdecode_worker.contract import Buckets, Plan, PlanState, TreeShape, suppressed_loads


def held_back_loads(observed: Observation, plan: Plan | None) -> set[tuple[int, int]]:
    """Return the loads (concurrency, context) where the guards of all workers suppress speculation."""
    return suppressed_loads(observed.reports, plan.version) if plan is not None else set()


def depth_in_use(
    deployment: Deployment, observed: Observation, learned: LearnedState, plan: Plan, buckets: Buckets
) -> int | None:
    """Return the draft depth at the present load, or None while no worker reports that it runs this plan."""
    if deployment.spec.speculation.method == "none":
        return None
    running = [report for report in observed.reports if report.plan.version == plan.version]
    if not running:
        return None
    if all(report.draft.problem for report in running):
        return 0
    concurrency, context = loads.present_row(learned.load, buckets)
    if (concurrency, context) in held_back_loads(observed, plan):
        return 0
    if not any(report.plan.matches_draft for report in running):
        return plan.initial.depth
    return plan.shape(concurrency, context, learned.load.task).depth


def suspended_shape(observed: Observation, learned: LearnedState, plan: Plan, buckets: Buckets) -> TreeShape | None:
    """Return the plan's shape at the present load if it speculates and the guards of all workers suspend it."""
    present = loads.present_row(learned.load, buckets)
    shape = plan.shape(*present, learned.load.task)
    return shape if shape.nodes and present in held_back_loads(observed, plan) else None


def nodes_in_use(plan: Plan, learned: LearnedState, buckets: Buckets, depth: int | None) -> int | None:
    """Return the number of draft tokens of the shape in use; 0 for plain decoding, None where the depth is unknown."""
    if not depth:
        return depth
    return plan.shape(*loads.present_row(learned.load, buckets), learned.load.task).nodes


def task_depths(deployment: Deployment, plan: Plan, learned: LearnedState, buckets: Buckets) -> dict[str, int]:
    """Return the draft depth of every task of the spec at the present load."""
    concurrency, context = loads.present_row(learned.load, buckets)
    names = [task.name for task in deployment.spec.speculation.tasks]
    return {name: plan.shape(concurrency, context, name).depth for name in names}


def workers_to_push(observed: Observation, plan: Plan, excluded: Collection[str]) -> tuple[str, ...]:
    """Return the addresses of workers that report a lower plan version, or the plan of another deployment.

    Args:
        observed: Workers with their reports.
        plan: The plan that all workers should run.
        excluded: Addresses of workers that run a plan of their own.
    """
    return tuple(
        worker.address
        for worker in (*observed.workers, *observed.prefill)
        if worker.address and worker.report and not worker.leaving and worker.address not in excluded
        if _needs(worker.report.plan, plan)
    )


def _needs(running: PlanState, plan: Plan) -> bool:
    return running.uid != plan.uid or running.version < plan.version or running.quiet != plan.quiet
