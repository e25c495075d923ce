"""Shares of traffic of several deployments that serve one model name, for the trial of a new model.

A conversation has one deployment by weighted rendezvous hash, so all of its turns are answered by one model. If a share
grows, conversations only move towards that deployment; if it becomes 0, only its own conversations move away.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdecode_router.placement.affinity import Affinity
from specdecode_router.placement.choose import eligible_workers
from specdecode_router.placement.rendezvous import rendezvous_score
from specdecode_router.workers.worker import WorkerView

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrafficSplit:
    """Shares of deployments. Without others, all workers belong to the own deployment."""

    own: str = ""
    """Name of the deployment of this router."""
    percents: Mapping[str, float] = field(default_factory=dict)
    """Shares of the other deployments in percent. The own deployment has the rest."""
    _refused: set[str] = field(default_factory=set)
    """Deployments of which a worker with another model name was logged."""

    def has_share(self, deployment: str) -> bool:
        """Return whether a deployment may get requests: the own one always, as the last resort."""
        return not self.percents or deployment == self.own or self.percents.get(deployment, 0) > 0

    def workers_for(
        self, workers: Sequence[WorkerView], affinity: Affinity, *, key: str, exclude: frozenset[str], current: str
    ) -> Sequence[WorkerView]:
        """Return the workers of the deployment that should serve a request.

        A deployment without a worker that can serve it is passed over, so a failing trial costs no request.

        Args:
            workers: All known workers.
            affinity: Affinity of the request.
            key: Compatibility key of an attempt that is to be continued. Workers of another deployment than the
                current one must have this key; one whose key is not known yet is not enough.
            exclude: Names of workers that are not chosen.
            current: Deployment of the last attempt; empty before the first one.
        """
        if not self.percents:
            return workers
        groups = self._groups(workers)
        if key:
            groups = {
                name: [w for w in group if name == current or w.compatibility_key == key]
                for name, group in groups.items()
            }
        able = {name: eligible_workers(group, key, exclude) for name, group in groups.items()}
        order = [name for name in self._order(affinity) if able.get(name)]
        trusted = [name for name in order if not all(worker.suspect for worker in able[name])]
        return groups[(trusted or order)[0]] if order else ()

    def _groups(self, workers: Sequence[WorkerView]) -> dict[str, list[WorkerView]]:
        """Return the workers by deployment, without those that serve another model name than the own deployment."""
        groups: dict[str, list[WorkerView]] = {}
        for worker in workers:
            groups.setdefault(worker.endpoint.deployment, []).append(worker)
        names = {worker.model for worker in groups.get(self.own, ()) if worker.model}
        if not names:
            return groups
        return {
            deployment: [w for w in group if w.model in names or not w.model or self._refuse(w, names)]
            for deployment, group in groups.items()
        }

    def _refuse(self, worker: WorkerView, names: set[str]) -> bool:
        """Log that a worker serves another model name, once for each deployment. Return False."""
        deployment = worker.endpoint.deployment
        if deployment not in self._refused:
            self._refused.add(deployment)
            log.warning("deployment %s gets no traffic: its model is called %s, not %s", deployment, worker.model,
                        ", ".join(sorted(names)))  # fmt: skip
        return False

    def _order(self, affinity: Affinity) -> list[str]:
        """Return the deployments in the order of their rank for the affinity.

        The own deployment is the last resort even without a share. Another one without a share gets nothing.
        """
        shares = {self.own: 100 - sum(self.percents.values()), **self.percents}
        key = affinity.key
        ranked = sorted((name for name, share in shares.items() if share > 0),
                        key=lambda name: -rendezvous_score(key, name, shares[name]))  # fmt: skip
        return ranked if self.own in ranked else [*ranked, self.own]
