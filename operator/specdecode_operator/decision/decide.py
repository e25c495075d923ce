"""The decision about one deployment, in stages. Pure.

Roll out drafts -> learn -> watch drift -> merge drafts -> plan -> heal -> size -> record -> materialise.

Each stage is a function with a typed result. Every field of the learned state is written by one stage; `decide` puts
them together once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.decision.learn import Learnt, learn, stale_workers, watch_drift
from specdecode_operator.decision.merging import choose_merges, own_acceptance
from specdecode_operator.decision.plan import (
    Planned,
    figures_of,
    first_acceptance,
    in_use,
    is_urgent,
    plan,
    record,
    task_depths,
    workers_to_push,
)
from specdecode_operator.health import heal
from specdecode_operator.manifests import is_pinned, unpinned_uris
from specdecode_operator.planning.acceptance import follows, lacking
from specdecode_operator.planning.estimates import buckets_for, context_rates
from specdecode_operator.rollout.phases import step_rollout
from specdecode_operator.rollout.runs import is_job_due, jobs_to_delete, needed_drafts, run_to_delete
from specdecode_operator.scaling import drafting_share, is_complete, size
from specdecode_operator.state.learned import LearnedState, Session, TemplateState
from specdecode_operator.types import (
    Decision,
    Defaults,
    Deployment,
    Figures,
    Manifest,
    Observation,
    Shown,
    Worker,
    Workload,
)
from specdecode_worker.contract import Buckets, Plan

PUBLISH_SECONDS = 30.0
"""Least time between two updates of the figures in status, so that status is written seldom."""


def decide(
    deployment: Deployment, observed: Observation, defaults: Defaults, *, now: float
) -> tuple[Decision, Session]:
    """Return what should be so, and the state after it.

    Args:
        deployment: The resource.
        observed: Children, workers with their latest reports, and the state before.
        defaults: Values of the operator's settings.
        now: Operator's clock, in seconds since the epoch.

    Raises:
        SpecError: The spec asks for something impossible; the message says what to change.
    """
    buckets = buckets_for(deployment.spec.engine.max_num_seqs)
    rollout = step_rollout(deployment, observed, now=now)
    observed = replace(observed, session=replace(observed.session, drafts=rollout.record))
    learnt = learn(deployment, observed, buckets, now=now)
    own = own_acceptance(learnt.delta, learnt.learned.draft) if learnt.delta else None
    drift = watch_drift(deployment, rollout.record, learnt.learned, own, now=now)
    merged = choose_merges(deployment, observed, drift.learned, learnt.delta, buckets, now=now)
    learnt = replace(learnt, learned=merged.learned)
    planned = plan(merged.deployment, observed, learnt.learned, buckets, now=now)
    update = {"rows": planned.rows, "swept_at": planned.swept_at, "plan": planned.plan, "pin": planned.pin.text}
    with_plan = learnt.learned.model_copy(update=update)
    healed = heal(
        deployment,
        observed,
        with_plan,
        planned.plan,
        is_complete=is_complete(observed.workload, observed.workers),
        now=now,
    )
    session = replace(
        observed.session,
        baselines=learnt.baselines,
        window=learnt.window,
        silent=learnt.silent,
        round=observed.round,
    )
    scale, scaling = size(merged.deployment, observed, with_plan, learnt.delta, learnt.window, now)
    update = {"recycling": healed.recycling, "recycled_at": healed.recycled_at, "scaling": scaling}
    with_size = with_plan.model_copy(update=update)
    revisions = settle_revisions(deployment, learnt.learned.revisions, observed.workers)
    changes = (*rollout.changes, *drift.changes, *merged.changes, *planned.changes)
    recorded, changes = record(deployment, learnt.learned, with_size, changes, scale, now=now)
    template, children, job = materialise(
        deployment,
        observed,
        planned.plan,
        scale.replicas,
        defaults,
        prefill=scale.prefill,
        revisions=revisions,
        now=now,
    )
    learned = recorded.model_copy(update={"template": template, "revisions": dict(revisions)})
    figures = _figures(deployment, observed, learnt, planned, learned, buckets, now)
    session = replace(session, learned=learned, published_at=now if figures else session.published_at)
    is_due = figures is not None or bool(merged.changes)
    decision = Decision(
        plan=planned.plan,
        children=children,
        pushes=workers_to_push(observed, planned.plan, healed.own),
        job=job,
        ended_jobs=jobs_to_delete(observed.jobs, deployment, session.drafts),
        changes=changes,
        urgent=is_urgent(observed.session.learned, learned),
        learnt=learnt.delta is not None and not learnt.delta.idle,
        scale=scale,
        health=healed,
        shown=replace(
            _shown(deployment, observed, session, buckets, planned, figures, now),
            merges=merged.texts if is_due or not merged.texts else None,
        ),
    )
    return decision, session


def _figures(
    deployment: Deployment,
    observed: Observation,
    learnt: Learnt,
    planned: Planned,
    learned: LearnedState,
    buckets: Buckets,
    now: float,
) -> Figures | None:
    """Return figures for status every half minute.

    They are published at once when synthetic knobs are turned on or off, and when traffic has ended: otherwise a tick
    that comes late would leave the figures of the last traffic in status until the poll after the next one.
    """
    if not learnt.window:
        return None
    reports, shown = observed.reports, deployment.status.traffic
    synthetic = any(report.synthetic is not None for report in reports)
    turned = bool(reports) and shown is not None and synthetic != bool(shown.synthetic)
    busy = shown is not None and (shown.running or shown.waiting or shown.tokens_per_second)
    ended = busy and all(delta.idle for delta in learnt.window)
    if now - observed.session.published_at < PUBLISH_SECONDS and not (turned or ended):
        return None
    depths = task_depths(deployment, planned.plan, learned, buckets)
    return figures_of(
        learnt.window,
        learned.costs,
        depths,
        synthetic=synthetic,
        saved_device_seconds=learned.saved_device_seconds,
    )


def _shown(
    deployment: Deployment,
    observed: Observation,
    session: Session,
    buckets: Buckets,
    planned: Planned,
    figures: Figures | None,
    now: float,
) -> Shown:
    """Return the values for status, Events and metrics."""
    learned, current = session.learned, planned.plan
    used = in_use(deployment, observed, learned, current, buckets)
    return Shown(
        image=learned.template.image if learned.template else "",
        url=manifests.service_url(
            deployment.namespace, deployment.name, tls=deployment.spec.tls_secret_ref is not None
        ),
        selector=",".join(f"{key}={value}" for key, value in manifests.selector(deployment.name).items()),
        recommended=planned.recommended,
        depth=used.depth,
        suspended=used.suspended,
        nodes=used.nodes,
        task_depths=task_depths(deployment, current, learned, buckets),
        figures=figures,
        measuring=lacking(learned) if follows(deployment.spec.speculation) else None,
        drafting_share=drafting_share(
            deployment.spec.speculation,
            learned,
            buckets,
            current.shape(*learned.load.row(buckets), learned.load.task),
            deployment.spec.engine.max_num_seqs,
        ),
        context_rates=context_rates(buckets, learned.contexts),
        first_acceptance=first_acceptance(learned.acceptance),
        history=learned.history,
        pinned=learned.pin,
        model_revision=learned.revisions.get(deployment.spec.model.uri),
        pin_problem=planned.pin.problem,
        silent=stale_workers(observed, session, now),
    )


# Last stage, materialise: the pod template and the child objects.

# Commits of the models whose URI names none: resolved once by the first pod, and used by all later pods. Pure.


def settle_revisions(
    deployment: Deployment, known: Mapping[str, str], workers: tuple[Worker, ...]
) -> Mapping[str, str]:
    """Return the commit of each unpinned model of the spec that is resolved, by its URI.

    A commit that is known stays, whatever other pods have resolved. A model that leaves the spec is dropped, so that it
    is resolved again when it comes back. After a loss of state, the commit of the target is that in the status.

    Args:
        deployment: The deployment.
        known: Commits of the state.
        workers: Pods, with the commits that they have. The oldest pod decides.
    """
    oldest_first = sorted(workers, key=lambda worker: (worker.created_at or 0, worker.name))
    shown = _commit_in_status(deployment.spec, deployment.status)
    revisions = {}
    for uri in unpinned_uris(deployment.spec):
        reported = (worker.revisions[uri] for worker in oldest_first if uri in worker.revisions)
        commit = known.get(uri) or shown.get(uri) or next(reported, None)
        if commit:
            revisions[uri] = commit
    return revisions


def _commit_in_status(spec: Spec, status: Status) -> Mapping[str, str]:
    """Return the commit of the target in the status, if it is of the present URI."""
    model = status.model
    if model is None or model.uri != spec.model.uri or not is_pinned(f"@{model.revision}"):
        return {}
    return {spec.model.uri: model.revision or ""}


def materialise(
    deployment: Deployment,
    observed: Observation,
    plan: Plan,
    replicas: int,
    defaults: Defaults,
    *,
    prefill: int,
    revisions: Mapping[str, str],
    now: float,
) -> tuple[TemplateState, tuple[Manifest, ...], Manifest | None]:
    """Return the pod template, the children in the order in which they are applied, and the Job to create, if any.

    The plan comes before the pods that mount it. Raises SpecError if the spec cannot be turned into a pod template.
    """
    if deployment.spec.distillation.job_template:
        manifests.check_job_template(deployment, defaults)
    template = _template(deployment, observed, defaults)
    children = (
        manifests.plan_config_map(deployment, plan, revisions),
        manifests.service(deployment, to_routers=_are_routers_serving(deployment, observed)),
        manifests.headless_service(deployment),
        manifests.budget(deployment),
        *((manifests.network_policy(deployment, peers),) if (peers := defaults.policy_peers) else ()),
        manifests.workload(deployment, template.template, template.spec_hash, replicas),
        *(
            (manifests.prefetch_daemon_set(deployment, template.template),)
            if deployment.spec.prefetch_node_selector
            else ()
        ),
        *_prefill_children(deployment, observed, template, prefill),
        *_router_children(deployment, observed, defaults),
    )
    return template, children, _job(deployment, observed, defaults, now)


def _job(deployment: Deployment, observed: Observation, defaults: Defaults, now: float) -> Manifest | None:
    record = observed.session.drafts
    if is_job_due(record, observed, now) and record.run is not None:
        uris = manifests.model_uris(deployment.spec)
        keep = needed_drafts(deployment, record, observed.drafts, record.run.place, uris) if record.run.claim else ()
        return manifests.distillation_job(deployment, record.run, defaults, keep)
    ended = run_to_delete(deployment, observed, now)
    return None if ended is None else manifests.deletion_job(deployment, ended, defaults)


def _are_routers_serving(deployment: Deployment, observed: Observation) -> bool:
    """Return whether the public Service selects the routers.

    Not before one of them is ready, and no more before they are taken away: they serve until no endpoint lists them.
    Not while a ready worker is of a version without internal streams: an upgrade of the operator replaces no workers.
    """
    are_ready = observed.routers is not None and observed.routers.ready > 0
    reports = [worker.report for worker in observed.workers if worker.ready and not worker.leaving]
    have_streams = all(report.compatibility_key for report in reports if report is not None)
    return deployment.spec.router.replicas > 0 and are_ready and have_streams


def _router_children(deployment: Deployment, observed: Observation, defaults: Defaults) -> tuple[Manifest, ...]:
    """Return the children that routers need. Those that are no longer wanted have no replicas: nothing is deleted."""
    if not deployment.spec.router.replicas:
        return (manifests.router_workload(deployment, defaults),) if observed.routers is not None else ()
    return (
        manifests.demand_config_map(deployment),
        manifests.router_account(deployment),
        manifests.router_role(deployment),
        manifests.router_role_binding(deployment),
        manifests.router_budget(deployment),
        manifests.router_settings(deployment),
        manifests.router_workload(deployment, defaults),
    )


def _prefill_children(
    deployment: Deployment, observed: Observation, template: TemplateState, replicas: int
) -> tuple[Manifest, ...]:
    """Return the Deployment of prefill workers. It has no replicas once none are wanted: nothing is deleted."""
    if not deployment.spec.prefill.is_used and observed.prefill_workload is None:
        return ()
    return (manifests.prefill_workload(deployment, template.template, template.spec_hash, replicas),)


def _template(deployment: Deployment, observed: Observation, defaults: Defaults) -> TemplateState:
    """Return the last template while the rolling part of the spec is unchanged: an operator upgrade rolls no pods.

    After a loss of state, the last template is that of the running workload.
    """
    spec_hash = manifests.rolling_hash(deployment.spec)
    known = observed.session.learned.template or _running_template(observed)
    if known and known.spec_hash == spec_hash and deployment.spec.workers.update_policy == "OnSpecChange":
        return known
    template = manifests.pod_template(deployment, defaults)
    return TemplateState(spec_hash=spec_hash, template=template, image=manifests.resolved_image(template))


def _running_template(observed: Observation) -> TemplateState | None:
    """Return the template of the running workload after a loss of state."""
    workload = observed.workload
    if observed.session.stored or workload is None:
        return None
    return template_of(workload)


def template_of(workload: Workload) -> TemplateState | None:
    """Return the template that a workload runs, or None if it does not say which spec it was made of."""
    if not workload.spec_hash or not workload.template:
        return None
    template = dict(workload.template)
    return TemplateState(spec_hash=workload.spec_hash, template=template, image=manifests.resolved_image(template))
