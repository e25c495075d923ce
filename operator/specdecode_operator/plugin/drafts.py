"""Text of ``drafts``, and the changes of the spec that its commands make. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from specdecode_operator.api.v1alpha1 import DraftStatus, DraftVersionStatus, Spec
from specdecode_operator.drafts.drift import BATCH_REQUESTS
from specdecode_operator.drafts.job_status import obstacle_in_phase, obstacle_in_spec
from specdecode_operator.errors import PluginError
from specdecode_operator.plugin.overview import ABSENT, age, figure, percent, spec_of, status_of, table, word, wrapped
from specdecode_operator.rollout.drift_run import worth_of_drift
from specdecode_operator.state.learned import ALL_TASKS, DriftState, TaskDrift

# Lines of ``explain`` on the drift of the draft: speed by task against the baseline, and the worth of a run. Pure.

DRIFT_HEAD = ("TASK", "BASELINE", "NOW", "SPEED", "EVIDENCE")
MAX_EVIDENCE = 999_999.0
"""Largest evidence that is shown. It grows without a bound where all tasks together are slower because one is."""


def drift_lines(spec: Spec, drift: DriftState, now: float) -> Iterator[str]:
    """Yield the speed of each task against its baseline. Nothing is yielded before a worker reported its draft."""
    if not drift.draft:
        return
    yield ""
    if drift.tasks:
        yield from table(DRIFT_HEAD, [_row(task, now) for task in drift.tasks], "  ")
        yield (
            "Baseline and now are tokens per step of a chain of three, at this time of the day. Evidence is compared"
            " with the number after it, at which a drift is found."
        )
    else:
        yield f"The baseline of the draft's speed is learnt from the first {BATCH_REQUESTS} requests on."
    if drift.renewed:
        yield f"The baseline began anew: {drift.renewed}."
    if drift.stale:
        worth = worth_of_drift(spec, drift).sentence()
        yield f"{worth[:1].upper()}{worth[1:]}."


def _row(task: TaskDrift, now: float) -> tuple[str, ...]:
    name = "(all)" if task.task == ALL_TASKS else task.task
    if task.is_learning:
        return name, f"learning, {sum(task.counts):.0f} batches", ABSENT, ABSENT, ABSENT
    usual, present = task.tokens(now)
    if not task.recent_weight:
        return name, figure(usual), ABSENT, ABSENT, ABSENT
    evidence = min(task.threshold * task.evidence, MAX_EVIDENCE)
    compared = f"{figure(evidence, 0)} of {math.ceil(task.threshold)}{' (drift)' if task.since else ''}"
    return name, figure(usual), figure(present), percent(round(-100 * task.loss)), compared


# Text of ``drafts``: the draft in use, the rollout of another one, and the candidates before it. Pure.

HEAD = ("AGE", "OUTCOME", "DRAFT", "PAIRS", "GAIN", "FROM")
HASH_LENGTH = 12
"""Characters of a hash that are shown."""


def drafts(resource: dict[str, Any], now: float) -> list[str]:
    """Return the state of the drafts of one deployment."""
    spec, draft = spec_of(resource), status_of(resource).draft
    if draft is None or draft.phase is None:
        candidate = spec.draft_rollout.candidate
        waits = f"; the candidate {candidate.uri} waits" if candidate else ", and none is offered"
        lines = [f"no candidate was tried for {resource['metadata']['name']} yet{waits}"]
        refused = (one.message for one in status_of(resource).conditions if one.reason == "RunRefused")
        return [*lines, *(line for message in refused for line in wrapped(message, ""))]
    rows = [("current", *_version(draft.current))]
    rows += [
        (name, *_version(one)) for name, one in (("candidate", draft.candidate), ("previous", draft.previous)) if one
    ]
    lines = [f"{draft.phase}, mode {spec.draft_rollout.mode}", "", *table(("DRAFT", "HASH", "FROM"), rows)]
    for progress in (run_line(draft), trial_line(draft), last_run_line(draft, now)):
        lines += ["", *wrapped(progress, "")] if progress else []
    lines += ["", *wrapped(draft.last_verdict, "")] if draft.last_verdict else []
    if draft.lineage:
        entries = [
            (
                age(entry.time, now),
                entry.outcome,
                entry.hash[:HASH_LENGTH],
                str(entry.pairs),
                _percent(entry.gain_percent),
                word(entry.uri),
            )
            for entry in draft.lineage
        ]
        lines += ["", *table(HEAD, entries)]
    return lines


def change_for(command: str, resource: dict[str, Any], now: str) -> dict[str, Any]:
    """Return the change of the spec that a command asks for.

    Args:
        command: promote, reject, rollback or distill.
        resource: The deployment.
        now: Present time as text, by which a request to train is a new one.

    Raises:
        PluginError: The command would change nothing now. The message says why.
    """
    status = status_of(resource)
    draft = status.draft or DraftStatus()
    phase = draft.phase or "Serving"
    current, candidate = draft.current or DraftVersionStatus(), draft.candidate or DraftVersionStatus()
    problem = ""
    change: dict[str, Any] = {}
    if command == "promote":
        waits = any(one.type == "DraftRollout" and one.reason == "WaitsForUser" for one in status.conditions)
        if not waits:
            problem = f"no draft waits for its promotion (phase {phase}); a trial in mode Manual must find it better"
        change = {"draftRollout": {"approve": candidate.hash}}
    elif command == "distill":
        problem = obstacle_in_spec(spec_of(resource)) or obstacle_in_phase(phase)
        change = {"distillation": {"trigger": {"request": now}}}
    elif phase in ("Collecting", "Distilling") and command == "reject":
        change = {"draftRollout": {"reject": draft.run.id if draft.run else None}}
    elif phase in ("Canary", "Promoting"):
        change = {"draftRollout": {"reject": candidate.hash or current.hash}}
    elif command == "reject":
        problem = f"no draft is trained, tried or promoted now (phase {phase})"
    elif draft.previous is None:
        problem = f"there is no draft to return to (phase {phase})"
    else:
        change = {"draftRollout": {"reject": current.hash}}
    if problem:
        raise PluginError(problem)
    return change


def run_line(draft: DraftStatus | None) -> str:
    """Return a sentence on the training run that is under way; empty without one."""
    run = draft.run if draft is not None else None
    if run is None:
        return ""
    if run.job is None:
        problem = f" {run.capture_problem}." if run.capture_problem else ""
        counted = f"{run.conversations or 0} of {run.needed or 0} conversations"
        return f"Run {run.id} collects: {counted} ({run.reason}).{problem}"
    reason = f": {run.job_reason}" if run.job_reason else ""
    losses = f", created again {run.losses} times" if run.losses else ""
    return f"Run {run.id} trains: Job {run.job} is {run.job_state}{reason}{losses}."


def last_run_line(draft: DraftStatus, now: float) -> str:
    """Return a sentence on the latest training run that ended; empty without one."""
    run = draft.last_run
    if run is None:
        return ""
    hours = f", {figure(run.device_seconds / 3600, 2)} device hours" if run.device_seconds else ""
    return f"Latest run {run.id}, {age(run.time, now)} ago: {run.outcome}{hours}: {run.reason}"


def trial_line(draft: DraftStatus | None) -> str:
    """Return a sentence on the trial that runs; empty without one."""
    if draft is None or draft.trial is None:
        return ""
    trial = draft.trial
    where = f"Pod {trial.pod} tries the candidate" if trial.pod else "No worker is ready to try the candidate"
    if trial.gain_percent is None:
        return f"{where}: no pair of blocks is finished."
    measured = f"{where}: {trial.pairs} pairs, gain {_percent(trial.gain_percent)}"
    if trial.least_gain_percent is None or trial.most_gain_percent is None:
        return f"{measured}; these are too few for bounds."
    bounds = f"{_percent(trial.least_gain_percent)} to {_percent(trial.most_gain_percent)}"
    return f"{measured} (between {bounds} with 97.5 % each)."


def _version(version: DraftVersionStatus | None) -> tuple[str, str]:
    return word(version.hash and version.hash[:HASH_LENGTH]) if version else "-", word(version.uri if version else None)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{'+' if value > 0 else ''}{figure(value, 1)} %"
