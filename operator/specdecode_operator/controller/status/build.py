"""Status of a deployment from observation, decision and outcome."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

from specdecode_operator.api.pins import Pin, read_pin
from specdecode_operator.api.v1alpha1 import (
    CapacityStatus,
    Condition,
    ConditionType,
    MemoryStatus,
    ModelStatus,
    PrefillStatus,
    RouterStatus,
    SpeculationSpec,
    SpeculationStatus,
    Status,
    TaskStatus,
    TrafficStatus,
)
from specdecode_operator.controller.status.conditions import (
    ConditionState,
    Finding,
    Past,
    available,
    conditions,
    draft_section,
    gib,
    milliseconds,
    not_ready,
    rounded,
    stalled,
    troubles,
    two_digits,
)
from specdecode_operator.times import iso, seconds_of_timestamp
from specdecode_operator.types import Decision, Deployment, Figures, Observation, Outcome

# Sections of status apart from its conditions: model, speculation, tasks, traffic, capacity and memory.
#
# Measurements stay, with the time of the measurement, until there are new ones.

SECONDS_PER_HOUR = 3600


def model_section(deployment: Deployment, revision: str | None) -> ModelStatus:
    """Return URI and revision of the model.

    An unpinned URI keeps its known revision until ``revision`` names another.
    """
    uri = deployment.spec.model.uri
    before = deployment.status.model
    known = before.revision if before is not None and before.uri == uri else None
    written = uri.rpartition("@")[2] if uri.startswith("hf://") and "@" in uri else None
    return ModelStatus(uri=uri, revision=revision or written or known)


def speculation_section(deployment: Deployment, decision: Decision, now: float) -> SpeculationStatus | None:
    if deployment.spec.speculation.method == "none":
        return None
    before = deployment.status.speculation or SpeculationStatus()
    history = decision.shown.history or before.history
    return before.model_copy(
        update={
            "depth": decision.shown.depth if decision.shown.depth is not None else before.depth,
            "nodes": decision.shown.nodes if decision.shown.nodes is not None else before.nodes,
            "plan_version": decision.plan.version,
            "pinned": decision.shown.pinned or None,
            "recommended": decision.shown.recommended,
            "device_hours_saved": _device_hours(before, decision.shown.figures),
            "history": history,
            "acceptance_by_context": _by_context(decision) if decision.shown.figures else before.acceptance_by_context,
            **_measured(before, decision.shown.figures, now),
        }
    )


def _by_context(decision: Decision) -> str | None:
    """Return the acceptance by context in a sentence. It changes with the figures, so that status is written seldom."""
    parts = (
        f"{task}: {', '.join(f'{rate:.2f} at {context}' for context, rate in rates.items())}"
        for task, rates in decision.shown.context_rates.items()
    )
    return "; ".join(parts)[:4096] or None


def task_sections(deployment: Deployment, decision: Decision) -> tuple[TaskStatus, ...]:
    known = {task.name: task for task in deployment.status.tasks}
    speculation = deployment.spec.speculation
    pin = read_pin(decision.shown.pinned, speculation) if decision.shown.pinned else None
    return tuple(
        _task(known.get(task.name, TaskStatus(name=task.name)), decision, _mode(task.name, speculation, pin))
        for task in speculation.tasks
    )


def router_section(deployment: Deployment, observed: Observation) -> RouterStatus | None:
    """Return the counts of the routers, or None for a deployment without routers."""
    wanted, routers = deployment.spec.router.replicas, observed.routers
    if not wanted:
        return None
    if routers is None:
        return RouterStatus(ready=f"0/{wanted}")
    if deployment.spec.router.autoscaled:
        wanted = routers.wanted
    return RouterStatus(replicas=routers.replicas, ready_replicas=routers.ready, ready=f"{routers.ready}/{wanted}")


def prefill_section(deployment: Deployment, observed: Observation) -> PrefillStatus | None:
    """Return the counts of the prefill workers, or None for a deployment without them."""
    workload = observed.prefill_workload
    if not deployment.spec.prefill.is_used or workload is None:
        return None
    return PrefillStatus(
        replicas=workload.replicas, ready_replicas=workload.ready, ready=f"{workload.ready}/{workload.wanted}"
    )


def memory_section(before: MemoryStatus | None, observed: Observation) -> MemoryStatus | None:
    """Return the memory of a serving worker; while none serves, that of a worker that did not fit."""
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


def start_section(before: str | None, observed: Observation) -> str | None:
    """Return the seconds of each stage of the start of the newest ready worker: ``pull 41.0, read 3.2, ...``."""
    started = [worker for worker in observed.workers if worker.ready and worker.report and worker.report.start]
    newest = max(started, key=lambda worker: worker.created_at or 0, default=None)
    if newest is None or newest.report is None or newest.report.start is None:
        return before
    stages = newest.report.start.model_dump()
    stages["pull"] += newest.pull_seconds or 0
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())


def traffic_section(before: TrafficStatus | None, figures: Figures | None) -> TrafficStatus | None:
    if figures is None:
        return before
    return TrafficStatus(
        running=round(figures.running, 1),
        waiting=round(figures.waiting, 1),
        tokens_per_second=two_digits(figures.tokens_per_second),
        synthetic=figures.synthetic,
    )


def capacity_section(before: CapacityStatus | None, decision: Decision) -> CapacityStatus | None:
    """Return demand and capacity, changed only with new figures. None without spec.scaling."""
    if decision.scale.wanted is None:
        return None
    if before is not None and decision.shown.figures is None:
        return before
    capacity = decision.scale.capacity
    arrivals = two_digits(decision.scale.arrivals)
    known = before.arrivals_per_second if before else None
    return CapacityStatus(
        wanted_replicas=decision.scale.wanted,
        requests_per_second=two_digits(capacity.rate) if capacity else None,
        arrivals_per_second=known if arrivals is None else arrivals,
        limited_by=capacity.limited_by if capacity else None,
    )


def _measured(before: SpeculationStatus, figures: Figures | None, now: float) -> dict[str, float | str | None]:
    """Return new measurements with their time if they differ from the known ones."""
    values: dict[str, float | None] = {}
    if figures is not None and figures.speed is not None:
        values["acceptance_rate"] = rounded(figures.speed.acceptance_rate)
        values["accepted_length"] = rounded(figures.speed.accepted_length)
    if figures is not None and figures.speedup is not None:
        values["speedup"] = rounded(figures.speedup)
    if all(getattr(before, name) == value for name, value in values.items()):
        return {}
    return {**values, "measured_at": iso(now)}


def _device_hours(before: SpeculationStatus, figures: Figures | None) -> float | None:
    """Return the hours saved with three significant digits, at most two of them after the point."""
    if figures is None or figures.saved_device_seconds is None:
        return before.device_hours_saved
    hours = figures.saved_device_seconds / SECONDS_PER_HOUR
    return round(float(f"{hours:.3g}"), 2) + 0.0


def _mode(task: str, speculation: SpeculationSpec, pin: Pin | None) -> str:
    """Return the mode that decides for a task: a pin first, then Off of the deployment, then the task's own mode."""
    if pin and pin.shape_of(task) is not None:
        return "Pinned"
    own = next((spec.mode for spec in speculation.tasks if spec.name == task), None)
    return speculation.mode if speculation.mode == "Off" or own is None else own


def _task(before: TaskStatus, decision: Decision, mode: str) -> TaskStatus:
    measured = decision.shown.figures.tasks.get(before.name) if decision.shown.figures else None
    values: dict[str, float | None] = {}
    if measured is not None:
        values = {
            "acceptance_rate": rounded(measured.acceptance_rate),
            "accepted_length": rounded(measured.accepted_length),
            "ttft_milliseconds": milliseconds(measured.ttft_seconds),
            "itl_milliseconds": milliseconds(measured.itl_seconds),
            "speedup": rounded(measured.speedup),
        }
    known = {name: value for name, value in values.items() if value is not None}
    depth = decision.shown.task_depths.get(before.name, before.depth)
    merge = before.merge if decision.shown.merges is None else decision.shown.merges.get(before.name)
    return before.model_copy(update={**known, "depth": depth, "mode": mode, "merge": merge})


# The whole status of a deployment. Equal inputs give an equal status, so that nothing is written at rest.

WITH_MEASUREMENTS = (ConditionType.scaling_limited, ConditionType.workers_healthy, ConditionType.draft_fresh)
"""Conditions whose messages contain measurements. These change with every poll."""
WITHOUT_REPORT_REASONS = ("NotLoadedYet", "NotCheckedYet")
"""Reasons of conditions that wait for the first report. An operator that has just started has read none, though workers
serve; the conditions then stay as they are until the first round of reports."""
ALTERNATING_REASONS = ("ImageNotPulled",)
"""Reasons whose message alternates: the kubelet reports the error of a pull, then its back-off, and so on."""
MAX_REASON, MAX_MESSAGE = 1024, 4096
"""Bytes of the REASON column and of a condition's message, as the CRD limits them."""


def status_of(
    deployment: Deployment,
    observed: Observation,
    decision: Decision,
    outcome: Outcome,
    *,
    now: float,
) -> Status:
    """Return the status of a deployment whose spec could be carried out.

    Args:
        deployment: The resource, with its previous status. Values that were not measured again stay as they are.
        observed: Children, pods and reports.
        decision: The desired state.
        outcome: Result of applying it.
        now: Time in seconds since the epoch; used only as the time of transitions and of measurements.
    """
    before, workload = deployment.status, observed.workload
    past = _past(before, now)
    states = [
        _steady(before, state, published=decision.shown.figures is not None, asked=observed.round > 0)
        for state in conditions(deployment, observed, decision, outcome, past=past, now=now)
    ]
    generation = deployment.generation
    ready = workload.ready if workload else 0
    return Status(
        observed_generation=generation,
        url=decision.shown.url,
        replicas=workload.replicas if workload else 0,
        ready_replicas=ready,
        selector=decision.shown.selector,
        ready=f"{ready}/{decision.scale.replicas}",
        reason=_reason(states),
        conditions=tuple(_condition(before, state, generation, now) for state in states),
        resolved_image=decision.shown.image or None,
        model=model_section(deployment, decision.shown.model_revision),
        speculation=speculation_section(deployment, decision, now),
        tasks=task_sections(deployment, decision),
        draft=draft_section(deployment, observed, outcome.job_problem),
        traffic=traffic_section(before.traffic, decision.shown.figures),
        capacity=capacity_section(before.capacity, decision),
        router=router_section(deployment, observed),
        prefill=prefill_section(deployment, observed),
        memory=memory_section(before.memory, observed),
        start=start_section(before.start, observed),
    )


def failed_status(
    before: Status,
    generation: int,
    reason: str,
    message: str,
    *,
    now: float,
    observed: Observation | None = None,
) -> Status:
    """Return the status of a deployment whose spec cannot be carried out: Stalled, not Ready, the rest as before.

    Args:
        before: The previous status.
        generation: Generation of the spec that was refused.
        reason: Reason in one word, for example SpecRefused.
        message: What is wrong with the spec and where.
        now: Time in seconds since the epoch.
        observed: Children and pods, if they are known. Available and the counts of workers follow from them; without
            them they stay as they were.
    """
    blocker = Finding(reason, message)
    states = [stalled(blocker), not_ready(blocker), *_availability(before, observed)]
    states.append(ConditionState(ConditionType.progressing, "False", reason, message))
    replaced = {ConditionType.reconciling, *(state.type for state in states)}
    others = (condition for condition in before.conditions if condition.type not in replaced)
    update = {
        "conditions": (*(_condition(before, state, generation, now) for state in states), *others),
        "reason": _reason(states),
        "observed_generation": generation,
    }
    workload = observed.workload if observed else None
    if workload is not None:
        counts = {"replicas": workload.replicas, "ready_replicas": workload.ready}
        update |= {**counts, "ready": f"{workload.ready}/{workload.wanted}"}
    return before.model_copy(update=update)


def _availability(before: Status, observed: Observation | None) -> list[ConditionState]:
    """Return Available of workers that an earlier spec started. Without an observation it stays as it was."""
    if observed is not None and observed.workload is not None:
        trouble = next(troubles(observed), None)
        return [available(observed.workload, observed.workload.wanted, trouble, at_zero="no worker is wanted")]
    if any(condition.type == ConditionType.available for condition in before.conditions):
        return []
    return [ConditionState(ConditionType.available, "False", "NoWorkers", "no worker was started")]


def _past(before: Status, now: float) -> Past:
    ready, blocked = _known(before, ConditionType.ready), _known(before, ConditionType.stalled)
    crashed = blocked is not None and blocked.reason == "WorkerFailing"
    if ready is None or ready.status == "True":
        return Past()
    since = seconds_of_timestamp(ready.last_transition_time)
    return Past(max(0.0, now - since), frozenset(named_pods(blocked.message) if blocked and crashed else ()))


def _steady(before: Status, state: ConditionState, *, published: bool, asked: bool) -> ConditionState:
    """Return ``state`` with its previous message where only a measurement or the phase of a retry changed in it.

    A condition that waits for reports is returned as it was until workers were asked for them.

    Args:
        before: The previous status.
        state: The new state.
        published: Whether new measurements are published now.
        asked: Whether this process has asked the workers for reports.
    """
    known = _known(before, state.type)
    if known is not None and state.reason in WITHOUT_REPORT_REASONS and not asked:
        return ConditionState(state.type, known.status, known.reason, known.message, known.status == "False")
    if known is None or (known.status, known.reason) != (state.status, state.reason):
        return state
    measured = state.type in WITH_MEASUREMENTS and state.status != "Unknown" and not published
    alternates = state.reason in ALTERNATING_REASONS and named_pods(known.message) == named_pods(state.message)
    return state._replace(message=known.message) if measured or alternates else state


def named_pods(message: str) -> set[str]:
    """Return the names of the pods that a condition's message is about."""
    return set(re.findall(r"\bpod (\S+):", message))


def _condition(before: Status, state: ConditionState, generation: int, now: float) -> Condition:
    known = _known(before, state.type)
    since = known.last_transition_time if known and known.status == state.status else iso(now)
    return Condition(
        type=state.type,
        status=state.status,
        reason=state.reason,
        message=state.message[:MAX_MESSAGE],
        last_transition_time=since,
        observed_generation=generation,
    )


def _known(before: Status, kind: ConditionType) -> Condition | None:
    return next((condition for condition in before.conditions if condition.type == kind), None)


def _reason(states: Iterable[ConditionState]) -> str | None:
    """Return what a user should look at first, for the REASON column, or None."""
    worst = next((state for state in states if state.bad), None)
    return f"{worst.reason}: {worst.message}"[:MAX_REASON] if worst else None
