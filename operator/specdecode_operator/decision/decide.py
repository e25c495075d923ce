"""What should be so: plan, replicas, pod template and children, from what was observed and remembered. Pure.

Where planning, scaling (through sizing) and manifests meet; it gives every number a single owner.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from specdecode_operator import manifests, planning
from specdecode_operator.decision import history
from specdecode_operator.decision import ingest as readings
from specdecode_operator.decision import overrides as steering
from specdecode_operator.decision import plan_stage as planned
from specdecode_operator.decision.size_stage import size
from specdecode_operator.health import pod_health
from specdecode_operator.health.remediation import verdicts
from specdecode_operator.state.learned import LearnedState, TemplateState
from specdecode_operator.state.session import Session
from specdecode_operator.telemetry import staleness as silence
from specdecode_operator.telemetry.deltas import Delta
from specdecode_operator.types import Decision, Defaults, Deployment, Figures, Manifest, Observation
from specdecode_worker.contract import Buckets, Plan

PUBLISH_SECONDS = 30.0


def decide(
    deployment: Deployment, observed: Observation, defaults: Defaults, *, now: float
) -> tuple[Decision, Session]:
    """Raises SpecError when the spec asks for what cannot be."""
    found = planning.buckets(deployment.spec.workers.max_num_seqs)
    memory, deltas = readings.read(observed, found, now)
    learned = steering.remembered(deployment, memory.learned)
    present = {worker.uid for worker in observed.workers}
    learned = learned.model_copy(update={"pods": pod_health.learn_pods(learned, deltas, present=present, now=now)})
    memory, delta = readings.together(observed, replace(memory, learned=learned), deltas, now)
    learned = planning.learn(learned, delta, now=now) if delta else _new_draft(learned, observed)
    learned = planning.meet(learned, readings.met(observed, observed.session), found, now=now)
    learned = history.realised(learned, delta, found) if delta else learned
    before = learned
    learned, pin, problem = steering.pinned(deployment, learned)
    chosen, standing = planned.chosen_of(deployment, observed, learned, found, now)
    learned, plan, changes, recommended = planned.plan_of(deployment, observed, learned, chosen, pin, found, now)
    watched, learned = verdicts(deployment, observed, learned, plan, now=now)
    sized, learned = size(deployment, observed, learned, memory, delta, now=now)
    sized, learned = steering.advised(deployment, sized, before, learned)
    learned, steps = steering.recorded(deployment, before, learned, sized.wanted, now)
    changes = (*steps, *changes)
    learned = history.recorded(learned, changes, before.plan)
    template = _template(deployment, observed, learned, defaults)
    learned = learned.model_copy(update={"template": template})
    memory = replace(memory, learned=learned, standing=standing)
    figures, memory = _published(deployment, observed, memory, plan, found, now)
    depth = planned.depth_in_use(deployment, observed, learned, plan, found)
    decision = Decision(
        plan=plan,
        replicas=sized.replicas,
        desired=sized.desired,
        wanted=sized.wanted,
        arrivals=sized.arrivals,
        capacity=sized.capacity,
        limited=sized.limited,
        deletion_costs=sized.deletion_costs,
        image=template.image,
        url=manifests.service_url(deployment.namespace, deployment.name),
        selector=",".join(f"{key}={value}" for key, value in manifests.selector(deployment.name).items()),
        children=_children(deployment, plan, template, sized.replicas),
        pushes=_pushes(observed, plan, deployment.uid, watched.own),
        suspects=watched.suspects,
        own_plans=watched.own_plans,
        recycle=watched.recycle,
        changes=changes,
        recommended=recommended,
        depth=depth,
        nodes=planned.nodes_in_use(plan, learned, found, depth),
        task_depths=planned.task_depths(deployment, plan, learned, found),
        figures=figures,
        first_acceptance=planning.first_acceptance(learned.acceptance),
        history=learned.history,
        pinned=learned.pin,
        pin_problem=problem,
        silent=silence.stale(observed, memory, now),
        urgent=_is_decision(observed.session.learned, learned),
        learnt=delta is not None and not delta.idle,
    )
    return decision, memory


# --- what goes out -------------------------------------------------------------------------------------------------


def _new_draft(learned: LearnedState, observed: Observation) -> LearnedState:
    """A draft is known as soon as a worker names it, long before its first token."""
    return planning.learn(learned, Delta(draft=readings.draft_of(observed, learned)), now=0)


def _pushes(observed: Observation, plan: Plan, uid: str, own: Collection[str]) -> tuple[str, ...]:
    """Addresses of workers whose report shows a lower version, or another plan than theirs; what a report says is
    what runs. Those in ``own`` get their own."""
    return tuple(
        worker.address
        for worker in observed.workers
        if worker.address
        and worker.report
        and not worker.leaving
        and worker.address not in own
        and (worker.report.plan.uid != uid or worker.report.plan.version < plan.version or worker.report.plan.quiet)
    )


# --- replicas, template, children ---------------------------------------------------------------------------------


def _template(
    deployment: Deployment, observed: Observation, learned: LearnedState, defaults: Defaults
) -> TemplateState:
    """The remembered template while the rolling part of the spec is the same: an upgrade of the operator rolls nothing.

    When the memory was lost, the live workload says what it was made of.
    """
    spec_hash = manifests.rolling_hash(deployment.spec)
    known = learned.template
    workload = observed.workload
    if known is None and not observed.session.found and workload and workload.spec_hash:
        template = dict(workload.template)
        known = TemplateState(spec_hash=workload.spec_hash, template=template, image=manifests.resolved_image(template))
    if known and known.spec_hash == spec_hash and deployment.spec.workers.update_policy == "OnSpecChange":
        return known
    template = manifests.pod_template(deployment, defaults)
    return TemplateState(spec_hash=spec_hash, template=template, image=manifests.resolved_image(template))


def _children(deployment: Deployment, plan: Plan, template: TemplateState, replicas: int) -> tuple[Manifest, ...]:
    return (
        manifests.plan_config_map(deployment, plan),
        manifests.service(deployment),
        manifests.budget(deployment),
        manifests.workload(deployment, template.template, template.spec_hash, replicas),
    )


# --- what is told -------------------------------------------------------------------------------------------------


def _published(
    deployment: Deployment, observed: Observation, memory: Session, plan: Plan, found: Buckets, now: float
) -> tuple[Figures | None, Session]:
    """Figures for status, at most every half minute; at once when knobs were turned on or off, which says how to
    read them."""
    if not memory.window:
        return None, memory
    reports, told = observed.reports, deployment.status.traffic
    synthetic = any(report.synthetic is not None for report in reports)
    turned = bool(reports) and told is not None and synthetic != bool(told.synthetic)
    if now - memory.published_at < PUBLISH_SECONDS and not turned:
        return None, memory
    figures = planning.figures(
        memory.window,
        memory.learned.costs,
        planned.task_depths(deployment, plan, memory.learned, found),
        synthetic=synthetic,
    )
    return figures, replace(memory, published_at=now)


def _is_decision(before: LearnedState, after: LearnedState) -> bool:
    """Whether something changed that must not be lost, rather than estimates that moved."""
    return (
        before.plan != after.plan
        or before.template != after.template
        or before.scaling.replicas != after.scaling.replicas
        or before.steering != after.steering
        or before.history != after.history
        or before.uid != after.uid
        or before.recycled_at != after.recycled_at
        or pod_health.suspected(before) != pod_health.suspected(after)
    )
