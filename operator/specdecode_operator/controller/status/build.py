"""The whole status of a deployment. Equal inputs give an equal status, so that nothing is written at rest."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specdecode_operator.api.v1alpha1 import Condition, ConditionType, Status
from specdecode_operator.controller.status import sections
from specdecode_operator.controller.status.condition_state import ConditionState
from specdecode_operator.controller.status.conditions import available, conditions, not_ready, stalled
from specdecode_operator.controller.status.draft_rollout import draft_section
from specdecode_operator.controller.status.progress import Finding, Past, troubles
from specdecode_operator.times import iso, seconds_of_timestamp
from specdecode_operator.types import Decision, Deployment, Observation, Outcome

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
        _steady(before, state, published=decision.figures is not None, asked=observed.round > 0)
        for state in conditions(deployment, observed, decision, outcome, past=past, now=now)
    ]
    generation = deployment.generation
    ready = workload.ready if workload else 0
    return Status(
        observed_generation=generation,
        url=decision.url,
        replicas=workload.replicas if workload else 0,
        ready_replicas=ready,
        selector=decision.selector,
        ready=f"{ready}/{decision.replicas}",
        reason=_reason(states),
        conditions=tuple(_condition(before, state, generation, now) for state in states),
        resolved_image=decision.image or None,
        model=sections.model_section(deployment, decision.model_revision),
        speculation=sections.speculation_section(deployment, decision, now),
        tasks=sections.task_sections(deployment, decision),
        draft=draft_section(deployment, observed, outcome.job_problem),
        traffic=sections.traffic_section(before.traffic, decision.figures),
        capacity=sections.capacity_section(before.capacity, decision),
        router=sections.router_section(deployment, observed),
        memory=sections.memory_section(before.memory, observed),
        start=sections.start_section(before.start, observed),
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
