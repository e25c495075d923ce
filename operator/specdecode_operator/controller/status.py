"""Status as a pure function of what was observed, decided and applied.

Meanings: Ready says that somebody answers, and nothing about speed. A condition exists only while its feature is in
use. Figures that were measured earlier stay, with the time of their measurement, until there are new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain

from specdecode_operator.api.pins import Pin, read_pin
from specdecode_operator.api.v1alpha1 import (
    CapacityStatus,
    Condition,
    ConditionType,
    DraftStatus,
    MemoryStatus,
    SpeculationSpec,
    SpeculationStatus,
    Status,
    TaskStatus,
    TrafficStatus,
)
from specdecode_operator.controller.conditions import Verdict, verdicts
from specdecode_operator.types import Decision, Deployment, Figures, Observation, Outcome

ROUNDING = 0.05
WITH_FIGURES = (ConditionType.scaling_limited, ConditionType.workers_alike)
"""Conditions whose messages have what was measured in them."""


def status_of(
    deployment: Deployment, observed: Observation, decision: Decision, outcome: Outcome, *, now: float
) -> Status:
    """The whole status. Equal inputs give equal status: nothing but ``now`` in a new condition tells the time."""
    before = deployment.status
    found = tuple(_calm(before, verdict, decision) for verdict in verdicts(deployment, observed, decision, outcome))
    workload = observed.workload
    ready = workload.ready if workload else 0
    return Status(
        observed_generation=deployment.generation,
        url=decision.url,
        replicas=workload.replicas if workload else 0,
        ready_replicas=ready,
        selector=decision.selector,
        ready=f"{ready}/{decision.replicas}",
        reason=_reason(found),
        conditions=tuple(_condition(before, verdict, deployment.generation, now) for verdict in found),
        resolved_image=decision.image or None,
        speculation=_speculation(deployment, decision, now),
        tasks=_tasks(deployment, decision),
        draft=_draft(deployment, observed),
        traffic=_traffic(before.traffic, decision.figures),
        capacity=_capacity(before.capacity, decision),
        memory=_memory(before.memory, observed),
    )


def failed_status(before: Status, generation: int, reason: str, message: str, *, now: float) -> Status:
    """The status of a spec that cannot be carried out: all as it was, and why nothing moves."""
    verdict = Verdict(ConditionType.reconciled, "False", reason, message)
    others = tuple(found for found in before.conditions if found.type != verdict.type)
    condition = _condition(before, verdict, generation, now)
    return before.model_copy(
        update={"conditions": (*others, condition), "reason": message[:1024], "observed_generation": generation}
    )


def iso(now: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rounded(value: float | None) -> float | None:
    """To 0.05: finer would change with every look and mean nothing."""
    return None if value is None else round(round(value / ROUNDING) * ROUNDING, 2)


def _calm(before: Status, verdict: Verdict, decision: Decision) -> Verdict:
    """Figures in words move with every poll; between two publications the words stay as they are."""
    if verdict.type not in WITH_FIGURES or decision.figures is not None:
        return verdict
    known = next((found for found in before.conditions if found.type == verdict.type), None)
    same = known is not None and (known.status, known.reason) == (verdict.status, verdict.reason)
    return verdict._replace(message=known.message) if known and same else verdict


def _capacity(before: CapacityStatus | None, decision: Decision) -> CapacityStatus | None:
    """As ``_calm``; and gone when nobody asks."""
    if decision.wanted is None:
        return None
    if before is not None and decision.figures is None:
        return before
    found = decision.capacity
    return CapacityStatus(
        wanted_replicas=decision.wanted,
        requests_per_second=float(f"{found.rate:.2g}") if found else None,
        arrivals_per_second=_told(decision.arrivals, before.arrivals_per_second if before else None),
        limited_by=found.limited_by if found else None,
    )


def _told(arrivals: float | None, before: float | None) -> float | None:
    """Two digits: of arrivals a minute no more is known, and status is written on change."""
    return before if arrivals is None else float(f"{arrivals:.2g}")


def _condition(before: Status, verdict: Verdict, generation: int, now: float) -> Condition:
    known = next((found for found in before.conditions if found.type == verdict.type), None)
    since = known.last_transition_time if known and known.status == verdict.status else iso(now)
    return Condition(
        type=verdict.type,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message[:4096],
        last_transition_time=since,
        observed_generation=generation,
    )


def _reason(found: tuple[Verdict, ...]) -> str | None:
    """What a user should look at first, if anything."""
    worst = next((verdict for verdict in found if verdict.bad), None)
    return f"{worst.reason}: {worst.message}"[:1024] if worst else None


def _speculation(deployment: Deployment, decision: Decision, now: float) -> SpeculationStatus | None:
    if deployment.spec.speculation.method == "none":
        return None
    before = deployment.status.speculation or SpeculationStatus()
    history = decision.history or before.history
    last = history[0] if history else None
    return before.model_copy(
        update={
            "depth": decision.depth if decision.depth is not None else before.depth,
            "nodes": decision.nodes if decision.nodes is not None else before.nodes,
            "plan_version": decision.plan.version,
            "pinned": decision.pinned or None,
            "recommended": decision.recommended,
            "history": history,
            "last_decision": f"{last.load}: {last.before} -> {last.after}: {last.reason}"[:4096] if last else None,
            **_measured(before, decision.figures, now),
        }
    )


def _measured(before: SpeculationStatus, figures: Figures | None, now: float) -> dict[str, float | str | None]:
    """New figures when there are any and they differ; an idle deployment keeps what was measured last."""
    values: dict[str, float | None] = {}
    if figures is not None and figures.speed is not None:
        values["acceptance_rate"] = rounded(figures.speed.acceptance_rate)
        values["accepted_length"] = rounded(figures.speed.accepted_length)
    if figures is not None and figures.speedup is not None:
        values["speedup"] = rounded(figures.speedup)
    if all(getattr(before, name) == value for name, value in values.items()):
        return {}
    return {**values, "measured_at": iso(now)}


def _tasks(deployment: Deployment, decision: Decision) -> tuple[TaskStatus, ...]:
    known = {task.name: task for task in deployment.status.tasks}
    speculation = deployment.spec.speculation
    pin = read_pin(decision.pinned, speculation) if decision.pinned else None
    return tuple(
        _task(known.get(task.name, TaskStatus(name=task.name)), decision, _mode(task.name, speculation, pin))
        for task in speculation.tasks
    )


def _mode(task: str, speculation: SpeculationSpec, pin: Pin | None) -> str:
    """Who decides for a task: a pin before all, Off before a task's own mode."""
    if pin and pin.shape_of(task) is not None:
        return "Pinned"
    own = next((found.mode for found in speculation.tasks if found.name == task), None)
    return speculation.mode if speculation.mode == "Off" or own is None else own


def _task(before: TaskStatus, decision: Decision, mode: str) -> TaskStatus:
    speed = decision.figures.tasks.get(before.name) if decision.figures else None
    update: dict[str, float | int | str | None] = {
        "depth": decision.task_depths.get(before.name, before.depth),
        "mode": mode,
    }
    if speed:
        update["acceptance_rate"] = rounded(speed.acceptance_rate)
        update["accepted_length"] = rounded(speed.accepted_length)
    return before.model_copy(update=update)


def _draft(deployment: Deployment, observed: Observation) -> DraftStatus | None:
    if deployment.spec.speculation.draft is None:
        return None
    hashes = list(_hashes(observed))
    before = deployment.status.draft
    known = hashes[0] if hashes else (before.hash if before else None)
    return DraftStatus(hash=known, uri=deployment.spec.speculation.draft.uri)


def _memory(before: MemoryStatus | None, observed: Observation) -> MemoryStatus | None:
    """Of a worker that serves; while none does, what one found that could not."""
    served = ((report.memory, report.kv_tokens_total) for report in observed.last_reports if report.memory)
    refused = ((verdict.memory, verdict.kv_tokens) for verdict in observed.refusals)
    memory, tokens = next(chain(served, refused), (None, 0))
    if memory is None:
        return before
    return MemoryStatus(
        limit=gib(memory.limit),
        weights=gib(memory.weights),
        drafts=gib(memory.drafts),
        kv_cache=gib(memory.kv_cache),
        reserve=gib(memory.reserve),
        kv_tokens=tokens,
    )


def gib(size: int) -> str:
    """Bytes as Kubernetes writes quantities, to a hundredth."""
    return f"{size / 2**30:.2f}Gi"


def _hashes(observed: Observation) -> Iterator[str]:
    return (report.draft.hash for report in observed.last_reports if report.draft.hash)


def _traffic(before: TrafficStatus | None, figures: Figures | None) -> TrafficStatus | None:
    if figures is None:
        return before
    return TrafficStatus(
        running=round(figures.running, 1),
        waiting=round(figures.waiting, 1),
        tokens_per_second=float(f"{figures.tokens_per_second:.2g}"),
        synthetic=figures.synthetic,
    )
