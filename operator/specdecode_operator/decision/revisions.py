"""Commits of the models whose URI names none: resolved once by the first pod, and used by all later pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.manifests import is_pinned, unpinned_uris
from specdecode_operator.types import Deployment, Worker


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
