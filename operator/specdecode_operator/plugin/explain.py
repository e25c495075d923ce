"""Text of ``explain`` and ``history``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from specdecode_operator.api.v1alpha1 import Decision, Spec, SpeculationStatus, Status
from specdecode_operator.plugin.drafts import drift_lines, run_line
from specdecode_operator.plugin.overview import (
    acceptance_lines,
    age,
    figure,
    measuring,
    mode_of,
    percent,
    row_lines,
    spec_of,
    status_of,
    step_lines,
    table,
    unmet,
    word,
    wrapped,
)
from specdecode_operator.state.learned import LearnedState, LoadState, range_name
from specdecode_worker.contract import Buckets, Method

# Text of ``history``: the latest decisions with their expected and realised gains. Pure.

HEAD = ("AGE", "KIND", "BEFORE", "AFTER", "EXPECTED", "REALISED", "LOAD")


def past(resource: dict[str, Any], now: float) -> list[str]:
    """Return a table of decisions, newest first; below each line its measurements and its reason."""
    speculation = status_of(resource).speculation
    history = speculation.history if speculation else ()
    if not history:
        lack = measuring(status_of(resource).conditions)
        return [f"no decisions for {resource['metadata']['name']} yet{f', measuring: {lack}' if lack else ''}"]
    rows = [
        (
            age(decision.time, now),
            decision.kind,
            decision.before,
            decision.after,
            percent(decision.expected_gain_percent),
            percent(decision.realised_gain_percent),
            decision.load,
        )
        for decision in history
    ]
    head, *lines = table(HEAD, rows)
    out = [head]
    for line, decision in zip(lines, history, strict=True):
        out.append(line)
        out += wrapped(f"measured: {decision.measured}", "      ") if decision.measured else []
        out += wrapped(f"reason:   {decision.reason}", "      ")
    return out


# Text of ``explain``: the reasons for the depth and for the number of workers, with the measurements. Pure.
#
# It is made from the spec, the status and, if the user may read it, the state that the operator stored.


def explain(resource: dict[str, Any], learned: LearnedState | None, now: float, problem: str = "") -> list[str]:
    """Return the lines of ``explain``.

    Args:
        resource: SpecDecodeDeployment as the API server has it.
        learned: Stored state. None if it cannot be read.
        now: Time in seconds since the epoch.
        problem: Reason why there is no stored state.
    """
    spec, status = spec_of(resource), status_of(resource)
    name = f"{resource['metadata']['namespace']}/{resource['metadata']['name']}"
    lines = [f"{name}   {spec.model.target}   ready {word(status.ready)}", ""]
    lines += ["DEPTH", *_indented(_depth(resource, spec, status, learned, now))]
    if learned is not None:
        is_measuring = measuring(status.conditions) is not None
        measurements = _measurements(learned, spec.speculation.method, now, is_measuring=is_measuring)
        lines += ["", "MEASUREMENTS", *_indented(measurements)]
        lines += _indented(drift_lines(learned.drift, now))
    elif problem:
        lines += ["", *wrapped(f"The stored measurements cannot be shown: {problem}", "  ")]
    lines += ["", "WORKERS", *_indented(_workers(spec, status, now))]
    problems = [f"{one.type} is {one.status}, {one.reason}: {one.message}" for one in unmet(status.conditions)]
    if problems:
        lines += ["", "PROBLEMS", *_indented(problems)]
    return lines


def _indented(lines: Iterable[str]) -> list[str]:
    return [line if line.startswith("  ") else "\n".join(wrapped(line, "  ")) for line in lines]


# --- depth --------------------------------------------------------------------------------------------------------


def _depth(
    resource: dict[str, Any], spec: Spec, status: Status, learned: LearnedState | None, now: float
) -> Iterator[str]:
    speculation = status.speculation
    if spec.speculation.method == "none":
        yield "Speculation is off because speculation.method is none. No draft is loaded."
        return
    if speculation is None:
        yield "The operator has made no plan for this deployment yet."
        return
    yield f"Depth at the current load: {word(speculation.depth)}, from plan version {word(speculation.plan_version)}."
    yield _deciding_mode(mode_of(resource), spec)
    if dear := next((one.message for one in status.conditions if one.reason == "DraftingIsDear"), None):
        yield f"Warning: {dear}. A cheaper draft of equal acceptance would gain more."
    if speculation.acceptance_by_context:
        yield f"Acceptance of the first draft token by context, in tokens: {speculation.acceptance_by_context}."
    if speculation.recommended:
        yield f"Mode Auto would run {speculation.recommended} at the current load."
    yield from _not_planned(status)
    yield from _unapplied(status, learned)
    yield from _rollout(status)
    lack = measuring(status.conditions)
    if lack:
        yield f"Measuring: {lack}."
        return
    yield _figures(speculation, now)
    yield from (f"Task {task.name} {task.merge}." for task in status.tasks if task.merge)
    changes = [decision for decision in speculation.history if decision.kind == "Plan"]
    here = [one for one in changes if learned and learned.plan and _is_at(one, learned.load, learned.plan.buckets)]
    yield from (line for last in (here or changes)[:1] for line in _last_change(last, now))


def _is_at(decision: Decision, load: LoadState, found: Buckets) -> bool:
    """Return whether the decision changed the row of this load."""
    named, _, task = decision.load.rpartition(", task ")
    row = load.row(found)
    concurrency, context = range_name(found.concurrency, row[0]), range_name(found.context, row[1])
    groups = (group.removeprefix("concurrency ").partition(", context ") for group in named.split("; "))
    return task == load.task and any(of == context and concurrency in some.split(" or ") for some, _, of in groups)


def _unapplied(status: Status, learned: LearnedState | None) -> Iterator[str]:
    """Yield a line if the depth is still that of an earlier plan. Status has it until a worker reports the new plan."""
    depth = status.speculation.depth if status.speculation else None
    if learned is None or learned.plan is None or not depth:
        return
    plan, load = learned.plan, learned.load
    shape = plan.shape(*load.row(plan.buckets), load.task)
    if shape.depth != depth:
        yield f"Plan version {plan.version} has {shape} at this load. No worker has reported that it runs it yet."


def _figures(speculation: SpeculationStatus, now: float) -> str:
    """Return the sentence with the measured figures, or with what they wait for."""
    enough = "once there were 500 drafts within a minute"
    if not speculation.measured_at:
        return f"Not measured yet: acceptance rate and speedup are reported {enough}."
    measured = f"Measured {age(speculation.measured_at, now)} ago: speedup {figure(speculation.speedup)}"
    if speculation.acceptance_rate is None:
        return f"{measured}. The acceptance rate is reported {enough}."
    rate, length = figure(speculation.acceptance_rate), figure(speculation.accepted_length)
    return f"{measured}, acceptance rate {rate}, {length} tokens per step."


def _deciding_mode(mode: str, spec: Spec) -> str:
    depth, limits = spec.speculation.depth, spec.speculation.limits
    if mode.startswith("Pin "):
        return f"The pin {mode.removeprefix('Pin ')} decides (spec.speculation.pin). The guard stays active."
    sentences = {
        "Paused": "The deployment is paused: the operator updates its status only.",
        "Off": "Mode Off: the draft is loaded but not used.",
        "Static": f"Mode Static: the depth is speculation.depth.initial, {spec.speculation.initial}.",
        "Advisory": "Mode Advisory: the operator recommends a shape and does not change the plan.",
    }
    return sentences.get(
        mode,
        f"Mode Auto: the depth between {depth.min} and {depth.max} with the least time per token. It changes for a gain"
        f" of at least {limits.min_gain_percent:g} % and at most once in {limits.min_dwell_seconds:g} s,"
        " unless speculation loses or a trial ends.",
    )


def _rollout(status: Status) -> Iterator[str]:
    """Yield a line on the rollout of another draft, while one is under way."""
    phase = status.draft.phase if status.draft else None
    if phase not in (None, "Serving", "Cooldown"):
        yield f"Rollout of another draft: {phase}. {run_line(status.draft)}".rstrip()


def _not_planned(status: Status) -> Iterator[str]:
    """Yield a line if the workers decode plainly whatever is planned: the depth above is then not the plan's."""
    reasons = ("NoDraft", "SuspendedByGuards")
    for condition in status.conditions:
        if condition.reason in reasons:
            yield f"{condition.message[0].upper()}{condition.message[1:]}."


def _last_change(decision: Decision, now: float) -> Iterator[str]:
    realised = (
        f"Realised gain: {percent(decision.realised_gain_percent)}."
        if decision.realised_gain_percent is not None
        else "The realised gain is not measured yet."
    )
    yield (
        f"Last change, {age(decision.time, now)} ago, at {decision.load}: {decision.before} -> {decision.after}."
        f" Expected gain: {percent(decision.expected_gain_percent)}. {realised}"
    )
    yield f"Reason: {decision.reason}"


# --- measurements and workers ---------------------------------------------------------------------------------------


def _measurements(learned: LearnedState, method: Method, now: float, *, is_measuring: bool) -> Iterator[str]:
    yield f"Last load: {learned.load.sequences:.1f} sequences per step, mostly of task {learned.load.task}."
    seen = sum(cell.total for cell in learned.acceptance if (cell.depth, cell.parent) == (1, "main"))
    if is_measuring:
        yield f"The estimates rest on {seen:.0f} drafts so far. They are rough."
    yield from acceptance_lines(learned)
    yield from step_lines(learned, method, now)
    yield from row_lines(learned)


def _workers(spec: Spec, status: Status, now: float) -> Iterator[str]:
    yield from _owner(spec)
    traffic, capacity = status.traffic, status.capacity
    if traffic:
        yield (
            f"Demand in the last minute: {figure(traffic.running, 1)} running and {figure(traffic.waiting, 1)} waiting"
            f" requests, {figure(traffic.tokens_per_second, 0)} tokens per second. A worker runs up to"
            f" {spec.engine.max_num_seqs} requests."
        )
    if capacity and capacity.requests_per_second is not None:
        limit = f" (limited by {capacity.limited_by})" if capacity.limited_by else ""
        yield (
            f"Capacity of one worker: {figure(capacity.requests_per_second)} requests per second of this mix{limit}."
            f" Arrivals: {figure(capacity.arrivals_per_second)} per second."
        )
    if capacity and capacity.wanted_replicas is not None:
        yield f"Workers needed for this demand: {capacity.wanted_replicas}."
    if status.prefill:
        yield f"Prefill workers: {status.prefill.ready} ready. Long prompts are computed there."
    history = status.speculation.history if status.speculation else ()
    last = next((decision for decision in history if decision.kind == "Replicas"), None)
    if last:
        yield f"Last change, {age(last.time, now)} ago: {last.before} -> {last.after}. Reason: {last.reason}."


def _owner(spec: Spec) -> Iterator[str]:
    """Yield lines that name the owner of the number of workers."""
    scaling = spec.scaling
    if scaling is None:
        yield f"The number of workers follows changes of spec.replicas ({spec.replicas}); spec.scaling is absent."
    elif scaling.owner == "External":
        yield f"The number of workers follows changes of spec.replicas ({spec.replicas}), by an HPA, KEDA or a user."
    else:
        yield f"The operator scales between {scaling.min_replicas} and {scaling.max_replicas} workers."
        if spec.speculation.mode == "Advisory":
            yield "Mode Advisory: the operator recommends a number of workers and does not change it."
