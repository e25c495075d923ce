"""What should be so: plan, replicas, pod template and children, from what was observed and remembered. Pure.

Where planning, scaling (through sizing) and manifests meet; it gives every number a single owner.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from specdecode_operator import history, manifests, planned, planning, readings, silence, steering
from specdecode_operator.kept import Kept, TemplateMemory
from specdecode_operator.measurements import Delta
from specdecode_operator.memory import Memory
from specdecode_operator.records import Decision, Defaults, Deployment, Figures, Manifest, Observed
from specdecode_operator.sizing import size
from specdecode_operator.suspects import verdicts
from specdecode_worker.contract import Buckets, Plan

PUBLISH_SECONDS = 30.0


def decide(deployment: Deployment, observed: Observed, defaults: Defaults, *, now: float) -> tuple[Decision, Memory]:
    """Raises SpecError when the spec asks for what cannot be."""
    found = planning.buckets(deployment.spec.workers.max_num_seqs)
    memory, deltas = readings.read(observed, found, now)
    kept = steering.remembered(deployment, memory.kept)
    present = {worker.uid for worker in observed.workers}
    kept = kept.model_copy(update={"pods": planning.learn_pods(kept, deltas, present=present, now=now)})
    memory, delta = readings.together(observed, replace(memory, kept=kept), deltas, now)
    kept = planning.learn(kept, delta, now=now) if delta else _new_draft(kept, observed)
    kept = planning.meet(kept, readings.met(observed, observed.memory), found, now=now)
    kept = history.realised(kept, delta, found) if delta else kept
    before = kept
    kept, pin, problem = steering.pinned(deployment, kept)
    chosen, standing = planned.chosen_of(deployment, observed, kept, found, now)
    kept, plan, changes, recommended = planned.plan_of(deployment, observed, kept, chosen, pin, found, now)
    watched, kept = verdicts(deployment, observed, kept, plan, now=now)
    sized, kept = size(deployment, observed, kept, memory, delta, now=now)
    sized, kept = steering.advised(deployment, sized, before, kept)
    kept, steps = steering.recorded(deployment, before, kept, sized.wanted, now)
    changes = (*steps, *changes)
    kept = history.recorded(kept, changes, before.plan)
    template = _template(deployment, observed, kept, defaults)
    kept = kept.model_copy(update={"template": template})
    memory = replace(memory, kept=kept, standing=standing)
    figures, memory = _published(deployment, observed, memory, plan, found, now)
    depth = planned.depth_in_use(deployment, observed, kept, plan, found)
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
        nodes=planned.nodes_in_use(plan, kept, found, depth),
        task_depths=planned.task_depths(deployment, plan, kept, found),
        figures=figures,
        first_acceptance=planning.first_acceptance(kept.acceptance),
        history=kept.history,
        pinned=kept.pin,
        pin_problem=problem,
        silent=silence.stale(observed, memory, now),
        urgent=_is_decision(observed.memory.kept, kept),
        learnt=delta is not None and not delta.idle,
    )
    return decision, memory


# --- what goes out -------------------------------------------------------------------------------------------------


def _new_draft(kept: Kept, observed: Observed) -> Kept:
    """A draft is known as soon as a worker names it, long before its first token."""
    return planning.learn(kept, Delta(draft=readings.draft_of(observed, kept)), now=0)


def _pushes(observed: Observed, plan: Plan, uid: str, own: Collection[str]) -> tuple[str, ...]:
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


def _template(deployment: Deployment, observed: Observed, kept: Kept, defaults: Defaults) -> TemplateMemory:
    """The remembered template while the rolling part of the spec is the same: an upgrade of the operator rolls nothing.

    When the memory was lost, the live workload says what it was made of.
    """
    spec_hash = manifests.rolling_hash(deployment.spec)
    known = kept.template
    workload = observed.workload
    if known is None and not observed.memory.found and workload and workload.spec_hash:
        template = dict(workload.template)
        known = TemplateMemory(
            spec_hash=workload.spec_hash, template=template, image=manifests.resolved_image(template)
        )
    if known and known.spec_hash == spec_hash and deployment.spec.workers.update_policy == "OnSpecChange":
        return known
    template = manifests.pod_template(deployment, defaults)
    return TemplateMemory(spec_hash=spec_hash, template=template, image=manifests.resolved_image(template))


def _children(deployment: Deployment, plan: Plan, template: TemplateMemory, replicas: int) -> tuple[Manifest, ...]:
    return (
        manifests.plan_config_map(deployment, plan),
        manifests.service(deployment),
        manifests.budget(deployment),
        manifests.workload(deployment, template.template, template.spec_hash, replicas),
    )


# --- what is told -------------------------------------------------------------------------------------------------


def _published(
    deployment: Deployment, observed: Observed, memory: Memory, plan: Plan, found: Buckets, now: float
) -> tuple[Figures | None, Memory]:
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
        memory.kept.costs,
        planned.task_depths(deployment, plan, memory.kept, found),
        synthetic=synthetic,
    )
    return figures, replace(memory, published_at=now)


def _is_decision(before: Kept, after: Kept) -> bool:
    """Whether something changed that must not be lost, rather than estimates that moved."""
    return (
        before.plan != after.plan
        or before.template != after.template
        or before.scaling.replicas != after.scaling.replicas
        or before.steering != after.steering
        or before.history != after.history
        or before.uid != after.uid
        or before.recycled_at != after.recycled_at
        or planning.suspected(before) != planning.suspected(after)
    )
