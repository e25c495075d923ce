"""``explain``: why this depth, why this many workers, and the numbers behind. Pure.

From the spec, the status and, where the user may read it, what the operator remembers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdecode_operator.api.v1alpha1 import Decision, Spec, Status
from specdecode_operator.plugin.numbers import acceptance_lines, row_lines, step_lines
from specdecode_operator.plugin.overview import bad, mode_of, spec_of, status_of
from specdecode_operator.plugin.text import age, figure, percent, word, wrapped
from specdecode_operator.state.learned import LearnedState


def explain(resource: dict[str, Any], learned: LearnedState | None, now: float, problem: str = "") -> list[str]:
    """``problem`` says why there is no memory to read."""
    spec, status = spec_of(resource), status_of(resource)
    name = f"{resource['metadata']['namespace']}/{resource['metadata']['name']}"
    lines = [f"{name}   {spec.model.uri}   ready {word(status.ready)}", ""]
    lines += ["WHY THIS DEPTH", *_indented(_depth(resource, spec, status, learned, now))]
    if learned is not None:
        lines += ["", "THE NUMBERS BEHIND", *_indented(_numbers(learned))]
    elif problem:
        lines += ["", *wrapped(f"The operator's own figures cannot be read: {problem}", "  ")]
    lines += ["", "WHY THIS MANY WORKERS", *_indented(_workers(spec, status, now))]
    found = [f"{one.type} is {one.status}, {one.reason}: {one.message}" for one in bad(status.conditions)]
    if found:
        lines += ["", "WHAT IS NOT WELL", *_indented(found)]
    return lines


def _indented(lines: Any) -> list[str]:
    return [line if line.startswith("  ") else "\n".join(wrapped(line, "  ")) for line in lines]


def _depth(
    resource: dict[str, Any], spec: Spec, status: Status, learned: LearnedState | None, now: float
) -> Iterator[str]:
    speculation = status.speculation
    if spec.speculation.method == "none" or speculation is None:
        yield "speculation.method is none: no draft is loaded, every token is decoded plainly."
        return
    yield f"Depth {word(speculation.depth)} runs at the present load, plan version {word(speculation.plan_version)}."
    yield _who_decides(mode_of(resource), spec)
    if speculation.recommended:
        yield f"Without that, {speculation.recommended} would run at the present load."
    yield from _guard(status, learned)
    yield (
        f"Measured {age(speculation.measured_at, now)} ago: acceptance {figure(speculation.acceptance_rate)},"
        f" {figure(speculation.accepted_length)} tokens a step, speedup {figure(speculation.speedup)}."
        if speculation.measured_at
        else "Nothing was measured yet: figures need 500 drafts within a minute."
    )
    last = next((found for found in speculation.history if found.kind == "Plan"), None)
    if last:
        yield from _last(last, now)


def _who_decides(mode: str, spec: Spec) -> str:
    depth, hysteresis = spec.speculation.depth, spec.speculation.hysteresis
    if mode.startswith("Pin "):
        return f"It is pinned: {mode.removeprefix('Pin ')} (annotation specdecode.io/pin). The guard stays on."
    words = {
        "Paused": "The deployment is paused: nothing but status is written.",
        "Off": "Mode Off: the draft is loaded and not used.",
        "Static": f"Mode Static: depth.initial, {depth.initial}.",
        "Advisory": "Mode Advisory: the plan stays as it is.",
    }
    return words.get(
        mode,
        f"Mode Auto: the least time per token among depths {depth.min} to {depth.max}; a row moves for"
        f" {hysteresis.min_gain_percent:g} % or more, after {hysteresis.min_dwell_seconds} s or more.",
    )


def _guard(status: Status, learned: LearnedState | None) -> Iterator[str]:
    """The plan says one thing and the workers' guards another."""
    speculation = status.speculation
    if learned is None or learned.plan is None or speculation is None or speculation.depth != 0:
        return
    planned = [row.shape for row in learned.plan.rows] or [learned.plan.initial]
    if all(shape.nodes for shape in planned):
        yield "Every row of the plan speculates: the guards of the workers hold it back at this load."


def _last(found: Decision, now: float) -> Iterator[str]:
    brought = (
        f"it brought {percent(found.realised_gain_percent)}"
        if found.realised_gain_percent is not None
        else "what it brought is not measured yet"
    )
    yield (
        f"The last change, {age(found.time, now)} ago at {found.load}: {found.before} -> {found.after}. Expected"
        f" {percent(found.expected_gain_percent)}, {brought}."
    )
    yield f"Because: {found.reason}"


def _numbers(learned: LearnedState) -> Iterator[str]:
    yield f"Load that was seen last: {learned.load.sequences:.1f} sequences a step, most of task {learned.load.task}."
    yield from acceptance_lines(learned)
    yield from step_lines(learned)
    yield from row_lines(learned)


def _workers(spec: Spec, status: Status, now: float) -> Iterator[str]:
    scaling, traffic, capacity = spec.scaling, status.traffic, status.capacity
    if scaling is None:
        yield f"spec.replicas is {spec.replicas}, and without spec.scaling nobody else sets it."
    elif scaling.owner == "External":
        yield f"scaling.owner is External: an HPA, KEDA or a person set spec.replicas to {spec.replicas}."
    else:
        yield f"The operator scales between {scaling.min_replicas} and {scaling.max_replicas} workers."
        if spec.speculation.mode == "Advisory":
            yield "Mode Advisory: the replicas stay as they are."
    if traffic:
        yield (
            f"Demand, last minute: {figure(traffic.running, 1)} requests run, {figure(traffic.waiting, 1)} wait,"
            f" {figure(traffic.tokens_per_second, 0)} tokens a second; one worker runs {spec.workers.max_num_seqs}."
        )
    if capacity and capacity.requests_per_second is not None:
        limit = f", limited by {capacity.limited_by}" if capacity.limited_by else ""
        yield (
            f"One worker carries {figure(capacity.requests_per_second)} requests a second of this mix{limit};"
            f" {figure(capacity.arrivals_per_second)} arrive."
        )
    if capacity and capacity.wanted_replicas is not None:
        yield f"Demand asks for {capacity.wanted_replicas} workers."
    last = next(
        (one for one in (status.speculation.history if status.speculation else ()) if one.kind == "Replicas"), None
    )
    if last:
        yield f"The last change, {age(last.time, now)} ago: {last.before} -> {last.after}: {last.reason}."
