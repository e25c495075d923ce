"""Last stage, materialise: the pod template and the child objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.manifests import is_pinned, unpinned_uris
from specdecode_operator.rollout.runs import is_job_due, needed_drafts, run_to_delete
from specdecode_operator.state.learned import TemplateState
from specdecode_operator.types import Defaults, Deployment, Manifest, Observation, Worker, Workload
from specdecode_worker.contract import Plan

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
    shown = _shown(deployment.spec, deployment.status)
    revisions = {}
    for uri in unpinned_uris(deployment.spec):
        reported = (worker.revisions[uri] for worker in oldest_first if uri in worker.revisions)
        commit = known.get(uri) or shown.get(uri) or next(reported, None)
        if commit:
            revisions[uri] = commit
    return revisions


def _shown(spec: Spec, status: Status) -> Mapping[str, str]:
    """Return the commit of the target in the status, if it is of the present URI."""
    model = status.model
    if model is None or model.uri != spec.model.uri or not is_pinned(f"@{model.revision}"):
        return {}
    return {spec.model.uri: model.revision or ""}


# Stage 6, materialise: the pod template and the child objects. Pure.


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
