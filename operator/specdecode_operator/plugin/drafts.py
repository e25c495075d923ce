"""Text of ``drafts``, and the changes that its commands make. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from specdecode_operator.api.draft import DRAFT_KIND, UNRESOLVED, DraftResourceSpec, SpecDecodeDraft
from specdecode_operator.api.schema import URI_FORMS
from specdecode_operator.api.v1alpha1 import GROUP, VERSION, DraftStatus, NameRef
from specdecode_operator.drafts.drift import BATCH_REQUESTS
from specdecode_operator.drafts.job_status import obstacle_in_phase, obstacle_in_spec
from specdecode_operator.errors import PluginError
from specdecode_operator.plugin.overview import ABSENT, age, figure, percent, spec_of, status_of, table, wrapped
from specdecode_operator.state.learned import ALL_TASKS, DriftState, TaskDrift

# Lines of ``explain`` on the drift of the draft: speed by task against the baseline. Pure.

DRIFT_HEAD = ("TASK", "BASELINE", "NOW", "SPEED", "EVIDENCE")
MAX_EVIDENCE = 999_999.0
"""Largest evidence that is shown. It grows without a bound where all tasks together are slower because one is."""


def drift_lines(drift: DriftState, now: float) -> Iterator[str]:
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


def _row(task: TaskDrift, now: float) -> tuple[str, ...]:
    name = "(all)" if task.task == ALL_TASKS else task.task
    if task.baseline is None:
        batches = sum(task.learning.counts) if task.learning else 0
        return name, f"learning, {batches:.0f} batches", ABSENT, ABSENT, ABSENT
    usual, present = task.tokens(now)
    if not task.recent_weight:
        return name, figure(usual), ABSENT, ABSENT, ABSENT
    evidence = min(task.threshold * task.evidence, MAX_EVIDENCE)
    compared = f"{figure(evidence, 0)} of {math.ceil(task.threshold)}{' (drift)' if task.since else ''}"
    return name, figure(usual), figure(present), percent(round(-100 * task.loss)), compared


# Text of ``drafts``: what becomes of the drafts, and why. ``kubectl get sddr`` lists them. Pure.

HASH_LENGTH = 12
"""Characters of a hash that are shown."""


def drafts(resource: dict[str, Any], drafts: Iterable[dict[str, Any]], now: float) -> list[str]:
    """Return the state of the drafts of one deployment.

    Args:
        resource: The deployment.
        drafts: Its SpecDecodeDrafts.
        now: Time in seconds since the epoch.
    """
    spec, draft = spec_of(resource), status_of(resource).draft
    known = sorted(map(read_draft, drafts), key=lambda one: one.status.since or "", reverse=True)
    if draft is None or draft.phase is None:
        waits = [one for one in known if one.is_offered]
        sentence = f"; {waits[0].name} ({waits[0].spec.uri}) waits" if waits else ", and none is offered"
        lines = [f"no candidate was tried for {resource['metadata']['name']} yet{sentence}"]
        refused = (one.message for one in status_of(resource).conditions if one.reason == "RunRefused")
        return [*lines, *(line for message in refused for line in wrapped(message, ""))]
    lines = [f"{draft.phase}, mode {spec.draft_rollout.mode}"]
    for one in (run_line(draft), *map(trial_line, known), last_run_line(draft, now), draft.last_verdict):
        lines += ["", *wrapped(one, "")] if one else []
    return [*lines, "", f"All drafts: kubectl get sddr -n {resource['metadata']['namespace']} -o wide"]


def read_draft(resource: dict[str, Any]) -> SpecDecodeDraft:
    """Return a SpecDecodeDraft as the API server has it."""
    return SpecDecodeDraft.model_validate(resource)


def offer(
    resource: dict[str, Any], drafts: Iterable[dict[str, Any]], uri: str, hash: str | None
) -> dict[str, Any] | str:
    """Return the SpecDecodeDraft that offers a draft, or the name of the one that offers it again as a candidate.

    Raises:
        PluginError: URI or hash have no valid form, or the draft is offered already, or in use.
    """
    name = resource["metadata"]["name"]
    try:
        spec = DraftResourceSpec(deployment_ref=NameRef(name=name), uri=uri, hash=hash)
    except ValidationError as error:
        is_uri = error.errors()[0]["loc"] == ("uri",)
        problem = f"URI is {uri!r}; write {URI_FORMS}" if is_uri else f"HASH is {hash!r}, which is none of a draft"
        raise PluginError(problem) from error
    made = SpecDecodeDraft(metadata={"name": ""}, spec=spec)
    for known in map(read_draft, drafts):
        if known.spec.uri == uri and hash in (None, known.spec.hash):
            if known.spec.role != "Retired":
                raise PluginError(f"{known.name} offers this draft already; its phase is {known.status.phase}")
            return known.name
    suffix = re.sub(r"[^a-z0-9]", "-", made.id.removeprefix(UNRESOLVED)[:HASH_LENGTH].lower()).strip("-")
    metadata = {"name": f"{name}-{suffix}", "namespace": resource["metadata"]["namespace"]}
    manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": DRAFT_KIND, "metadata": metadata}
    return {**manifest, "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChange:
    """Change that a command asks for: of the deployment's spec, or of the role of one of its drafts."""

    spec: dict[str, Any] | None = None
    draft: str = ""
    """Name of the SpecDecodeDraft."""
    role: str = "Retired"


def change_for(command: str, resource: dict[str, Any], drafts: Iterable[dict[str, Any]], now: str) -> DraftChange:
    """Return the change that a command asks for.

    Args:
        command: promote, reject, rollback or distill.
        resource: The deployment.
        drafts: Its SpecDecodeDrafts.
        now: Present time as text, by which a request to train is a new one.

    Raises:
        PluginError: The command would change nothing now. The message says why.
    """
    draft = status_of(resource).draft or DraftStatus()
    phase, known = draft.phase or "Serving", [read_draft(one) for one in drafts]
    tried = next((one.name for one in known if one.status.phase == "Canary"), "")
    serving = next((one.name for one in known if one.status.phase in ("Promoting", "Serving")), "")
    problem = ""
    if command == "distill":
        problem = obstacle_in_spec(spec_of(resource)) or obstacle_in_phase(phase)
        change = DraftChange(spec={"distillation": {"trigger": {"request": now}}})
    elif command == "promote":
        waits = any(one.status.is_confirmed and one.name == tried for one in known)
        if not waits:
            problem = f"no draft waits for its promotion (phase {phase}); a trial in mode Manual must find it better"
        change = DraftChange(draft=tried, role="Serving")
    elif command == "reject" and draft.run is not None:
        change = DraftChange(spec={"distillation": {"trigger": {"reject": draft.run.id}}})
    elif command == "reject" and not tried and phase != "Promoting":
        raise PluginError(f"no draft is trained, tried or promoted now (phase {phase})")
    else:
        problem = "" if tried or serving else f"there is no draft to return to (phase {phase})"
        change = DraftChange(draft=tried or serving if command == "reject" else serving or tried)
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


def trial_line(draft: SpecDecodeDraft) -> str:
    """Return a sentence on the trial of a draft that runs; empty without one."""
    status = draft.status
    if status.trial is None:
        return ""
    where = f"Pod {status.trial.pod} tries" if status.trial.pod else "No worker is ready to try"
    where = f"{where} {draft.name}"
    if status.gain_percent is None:
        return f"{where}: no pair of blocks is finished."
    measured = f"{where}: {status.pairs} pairs, gain {_percent(status.gain_percent)}"
    if status.least_gain_percent is None or status.most_gain_percent is None:
        return f"{measured}; these are too few for bounds."
    bounds = f"{_percent(status.least_gain_percent)} to {_percent(status.most_gain_percent)}"
    return f"{measured} (between {bounds} with 97.5 % each)."


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{'+' if value > 0 else ''}{figure(value, 1)} %"
