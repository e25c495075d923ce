"""The decision about one deployment, in stages. Pure.

Roll out drafts -> learn -> watch drift -> merge drafts -> plan -> heal -> size -> record -> materialise.

Each stage is a function of its own module with a typed result. Every field of the learned state is written by one
stage; `decide` puts them together once.
"""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator import manifests
from specdecode_operator.decision import plan_stage
from specdecode_operator.decision.drift_stage import watch_drift
from specdecode_operator.decision.history import is_urgent, record
from specdecode_operator.decision.learn_stage import Learnt, learn, stale_workers
from specdecode_operator.decision.materialise_stage import materialise, settle_revisions
from specdecode_operator.decision.merge_stage import choose_merges
from specdecode_operator.decision.plan_stage import Planned, plan
from specdecode_operator.decision.size_stage import is_complete, size
from specdecode_operator.health import heal
from specdecode_operator.merging.credit import own_acceptance
from specdecode_operator.planning import acceptance_model, loads, step_pace, task_bounds
from specdecode_operator.planning import figures as measurements
from specdecode_operator.rollout.phases import step_rollout
from specdecode_operator.rollout.runs import jobs_to_delete
from specdecode_operator.state.learned import LearnedState
from specdecode_operator.state.session import Session
from specdecode_operator.types import (
    Decision,
    Defaults,
    Deployment,
    Figures,
    Observation,
    Shown,
)
from specdecode_worker.contract import Buckets

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
    buckets = loads.buckets(deployment.spec.engine.max_num_seqs)
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
    healed = heal(deployment, observed, with_plan, planned.plan, is_complete=is_complete(observed), now=now)
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
        pushes=plan_stage.workers_to_push(observed, planned.plan, healed.own),
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
    depths = plan_stage.task_depths(deployment, planned.plan, learned, buckets)
    return measurements.figures(
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
    used = plan_stage.in_use(deployment, observed, learned, current, buckets)
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
        task_depths=plan_stage.task_depths(deployment, current, learned, buckets),
        figures=figures,
        measuring=acceptance_model.lacking(learned) if task_bounds.follows(deployment.spec.speculation) else None,
        drafting_share=step_pace.drafting_share(
            deployment.spec.speculation,
            learned,
            buckets,
            current.shape(*loads.present_row(learned.load, buckets), learned.load.task),
            deployment.spec.engine.max_num_seqs,
        ),
        context_rates=loads.context_rates(buckets, learned.contexts),
        first_acceptance=measurements.first_acceptance(learned.acceptance),
        history=learned.history,
        pinned=learned.pin,
        model_revision=learned.revisions.get(deployment.spec.model.uri),
        pin_problem=planned.pin.problem,
        silent=stale_workers(observed, session, now),
    )
