"""Sections of status apart from its conditions: model, speculation, tasks, traffic, capacity and memory.

Measurements stay, with the time of the measurement, until there are new ones.
"""

from __future__ import annotations

from itertools import chain

from specdecode_operator.api.pins import Pin, read_pin
from specdecode_operator.api.v1alpha1 import (
    CapacityStatus,
    MemoryStatus,
    ModelStatus,
    RouterStatus,
    SpeculationSpec,
    SpeculationStatus,
    TaskStatus,
    TrafficStatus,
)
from specdecode_operator.controller.status.text import gib, milliseconds, rounded, two_digits
from specdecode_operator.times import iso
from specdecode_operator.types import Decision, Deployment, Figures, Observation

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
    history = decision.history or before.history
    last = history[0] if history else None
    return before.model_copy(
        update={
            "depth": decision.depth if decision.depth is not None else before.depth,
            "nodes": decision.nodes if decision.nodes is not None else before.nodes,
            "plan_version": decision.plan.version,
            "pinned": decision.pinned or None,
            "recommended": decision.recommended,
            "device_hours_saved": _device_hours(before, decision.figures),
            "history": history,
            "last_decision": f"{last.load}: {last.before} -> {last.after}: {last.reason}"[:4096] if last else None,
            **_measured(before, decision.figures, now),
        }
    )


def task_sections(deployment: Deployment, decision: Decision) -> tuple[TaskStatus, ...]:
    known = {task.name: task for task in deployment.status.tasks}
    speculation = deployment.spec.speculation
    pin = read_pin(decision.pinned, speculation) if decision.pinned else None
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
    if decision.wanted is None:
        return None
    if before is not None and decision.figures is None:
        return before
    capacity = decision.capacity
    arrivals = two_digits(decision.arrivals)
    known = before.arrivals_per_second if before else None
    return CapacityStatus(
        wanted_replicas=decision.wanted,
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
    measured = decision.figures.tasks.get(before.name) if decision.figures else None
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
    depth = decision.task_depths.get(before.name, before.depth)
    merge = before.merge if decision.merges is None else decision.merges.get(before.name)
    return before.model_copy(update={**known, "depth": depth, "mode": mode, "merge": merge})
