"""The tree of conditions, each as a pure verdict; status.py puts them together. Reasons are one word each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from specdecode_operator.api.v1alpha1 import ConditionType
from specdecode_operator.types import Decision, Deployment, Observation, Outcome

NAMED_PODS = 4
"""How many a message names, so that it stays one line."""


class Verdict(NamedTuple):
    """What one condition says now."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    bad: bool = False
    """Worth the REASON column."""


def verdicts(
    deployment: Deployment, observed: Observation, decision: Decision, outcome: Outcome
) -> tuple[Verdict, ...]:
    """All conditions whose feature is in use, the gravest first."""
    found = [reconciled(deployment, outcome), ready(observed, decision), progressing(observed), memory_fits(observed)]
    speculation = deployment.spec.speculation
    if speculation.method != "none":
        found += [draft_compatible(observed), workers_alike(decision)]
    if speculation.method != "none" and speculation.mode != "Off":
        found.append(speculation_effective(deployment, decision))
    if deployment.spec.scaling is not None and deployment.spec.scaling.owner == "Operator":
        found.append(scaling_limited(decision))
    if decision.pinned or decision.pin_problem:
        found.append(pinned(decision))
    found.append(reports_fresh(observed, decision))
    return tuple(found)


def reconciled(deployment: Deployment, outcome: Outcome) -> Verdict:
    kind = ConditionType.reconciled
    if deployment.paused:
        return Verdict(kind, "Unknown", "Paused", "the annotation specdecode.io/paused is set; only status is written")
    if outcome.problems:
        return Verdict(kind, "False", "ApplyRefused", "; ".join(map(str, outcome.problems)), True)
    return Verdict(kind, "True", "Applied", "all children are as they should be")


def ready(observed: Observation, decision: Decision) -> Verdict:
    kind = ConditionType.ready
    workload = observed.workload
    if workload and workload.available > 0:
        return Verdict(kind, "True", "WorkerAvailable", "at least one worker answers")
    if decision.replicas == 0:
        return Verdict(kind, "False", "ScaledToZero", "no workers are wanted", True)
    trouble = next(_troubles(observed), None)
    if trouble:
        return Verdict(kind, "False", "WorkerFailing", trouble, True)
    return Verdict(kind, "False", "WorkersStarting", "no worker is available yet", True)


def progressing(observed: Observation) -> Verdict:
    """True while a rollout or scaling is under way; a stalled one says why."""
    kind = ConditionType.progressing
    workload = observed.workload
    if workload is None:
        return Verdict(kind, "True", "Creating", "the workload is being made")
    if workload.settled:
        return Verdict(kind, "False", "Complete", "all workers run the present template")
    trouble = next(_troubles(observed), None) or workload.stalled
    counts = f"{workload.updated} of {workload.wanted} workers are up to date, {workload.available} available"
    if trouble:
        return Verdict(kind, "True", "Stalled", f"{counts}; {trouble}", True)
    return Verdict(kind, "True", "RollingOut", counts)


def memory_fits(observed: Observation) -> Verdict:
    """Found out by a worker before it loads anything. One that cannot fit never replaces one that serves."""
    kind = ConditionType.memory_fits
    refusal = next((verdict for verdict in observed.refusals if not verdict.fits), None)
    if refusal:
        return Verdict(kind, "False", "DoesNotFit", "\n".join((refusal.problem, *refusal.arithmetic)), True)
    found = next((report for report in observed.last_reports if report.memory), None)
    if found:
        message = f"{found.kv_tokens_total} tokens of keys and values fit beside the weights"
        return Verdict(kind, "True", "Fits", message)
    return Verdict(kind, "Unknown", "NotCheckedYet", "no worker has told yet")


def draft_compatible(observed: Observation) -> Verdict:
    """A draft that does not fit never takes the endpoint down: the workers serve plainly."""
    kind = ConditionType.draft_compatible
    refused = next((verdict.draft_problem for verdict in observed.refusals if verdict.draft_problem), None)
    if refused:
        return Verdict(kind, "False", "DraftRefused", f"{refused}; a new worker does not start", True)
    reports = observed.last_reports
    problem = next((report.draft.problem for report in reports if report.draft.problem), None)
    if problem:
        return Verdict(kind, "False", "DraftRefused", f"{problem}; the target serves plainly", True)
    if any(report.draft.hash for report in reports):
        return Verdict(kind, "True", "DraftLoaded", "the draft fits its target")
    return Verdict(kind, "Unknown", "NotLoadedYet", next(_report_problems(observed), "no worker has reported yet"))


def speculation_effective(deployment: Deployment, decision: Decision) -> Verdict:
    """Quality, outside Ready. Says what was measured last."""
    kind = ConditionType.speculation_effective
    known = deployment.status.speculation
    now = decision.figures.speedup if decision.figures else None
    speedup = now if now is not None else (known.speedup if known else None)
    if decision.depth == 0:
        return Verdict(kind, "False", "PlainIsFaster", "plain decoding runs at the present load")
    if speedup is None:
        return Verdict(kind, "Unknown", "NotMeasured", "too few drafts, or no plain steps to compare with")
    # Rounded as in status, so that the message changes only when the figure does.
    speedup = round(round(speedup / 0.05) * 0.05, 2)
    if speedup > 1:
        return Verdict(kind, "True", "Faster", f"{speedup:.2f} times plain decoding")
    if speedup == 1:
        return Verdict(kind, "False", "NoGain", "as fast as plain decoding, which may be what runs: see explain")
    return Verdict(kind, "False", "Slower", f"{speedup:.2f} times plain decoding")


def scaling_limited(decision: Decision) -> Verdict:
    kind = ConditionType.scaling_limited
    if decision.limited is not None:
        return Verdict(kind, "True", decision.limited.reason, decision.limited.message, True)
    return Verdict(kind, "False", "WithinBounds", "the bounds do not stand in the way of demand")


def workers_alike(decision: Decision) -> Verdict:
    """A pod that differs from its past and its peers is named; what is done about it is planning's."""
    kind = ConditionType.workers_alike
    if not decision.suspects:
        return Verdict(kind, "True", "Alike", "no worker stands out")
    told = [f"pod {suspect.pod}: {suspect.message}" for suspect in decision.suspects[:3]]
    others = len(decision.suspects) - len(told)
    message = "; ".join([*told, *([f"and {others} more"] if others else [])])
    return Verdict(kind, "False", decision.suspects[0].reason, message, True)


def pinned(decision: Decision) -> Verdict:
    """There while the annotation is. A value that does not read changes nothing but this."""
    kind = ConditionType.pinned
    if decision.pin_problem:
        still = f"; {decision.pinned} stays pinned" if decision.pinned else "; nothing is pinned"
        return Verdict(kind, "False", "BadPin", decision.pin_problem + still, True)
    return Verdict(kind, "True", "PinnedByAnnotation", f"{decision.pinned} runs at every load; the guard stays on")


def reports_fresh(observed: Observation, decision: Decision) -> Verdict:
    """Without reports a worker goes on serving its last plan; nothing is learnt of it, and no worker is removed."""
    kind = ConditionType.reports_fresh
    if decision.silent:
        told = [f"pod {name}: {decision.silent[name]}" for name in sorted(decision.silent)]
        others = [f"and {len(told) - NAMED_PODS} more"] if len(told) > NAMED_PODS else []
        message = "; ".join(("no report for some time: " + told[0], *told[1:NAMED_PODS], *others))
        return Verdict(kind, "False", "ReportsStale", message, True)
    if not any(worker.ready and not worker.leaving for worker in observed.workers):
        return Verdict(kind, "Unknown", "NoWorkers", "no worker is ready")
    return Verdict(kind, "True", "Reporting", "every ready worker reports")


def _troubles(observed: Observation) -> Iterator[str]:
    return (f"pod {worker.name}: {worker.trouble}" for worker in observed.workers if worker.trouble)


def _report_problems(observed: Observation) -> Iterator[str]:
    return (f"pod {worker.name}: {worker.report_problem}" for worker in observed.workers if worker.report_problem)
