"""Order of the writes of a reconcile: the rollout of drafts is stored before anything that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdecode_operator.controller.reconciler import Parts, Reconciler
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import Kind
from specdecode_operator.state.deployment_state import DeploymentState, Pending, StateTable
from specdecode_operator.state.draft_store import DraftStore
from specdecode_operator.state.packed import Packed
from specdecode_operator.state.store import StateStore
from specdecode_operator.training_jobs.job_writer import JobWriter
from specdecode_operator.types import ChildProblem, Key, Observation, Outcome
from support.operators.canary import Canary, capturing, distilling, trying
from support.operators.fleet import workload_with


class Cluster:
    """A cluster that lists what is applied, and refuses the ConfigMaps in ``down``."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.down: set[str] = set()

    async def apply(self, manifest: Mapping[str, Any], owner_uid: str) -> ChildProblem | None:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if name in self.down:
            return ChildProblem(kind, name, "Unavailable", "no answer")
        self.writes.append(f"{kind}/{name}")
        return None

    def digests(self, key: Key, names: Iterable[str]) -> dict[str, str]:
        return {}

    def recall(self, key: Key, digests: Mapping[str, str]) -> None: ...

    async def get(self, kind: Kind, namespace: str, name: str) -> None:
        return None

    async def ensure(self, deployment: object, *, suspicious: bool, mounted: bool) -> None: ...

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> None:
        self.writes.append(f"{kind.kind}/{manifest['metadata']['name']}")


async def carried_out(cluster: Cluster, canary: Canary) -> tuple[Outcome, StateTable]:
    """Carry out the last decision, and return what is published to workers."""
    assert canary.decision is not None
    table = StateTable()
    table.put(canary.deployment.key, DeploymentState(resource=Packed.of({}), generation=1))
    parts = SimpleNamespace(
        client=cluster,
        caches=SimpleNamespace(record=lambda child: None),
        table=table,
        applier=cluster,
        store=StateStore(cluster, cluster),
        drafts=DraftStore(cluster, cluster),
        tokens=cluster,
        jobs=JobWriter(cast(KubeClient, cluster)),
        published=lambda key: None,
    )
    workers = tuple(pod.worker() for pod in canary.pods)
    observed = Observation(workload=workload_with(2), workers=workers, session=canary.session)
    reconciler = Reconciler(cast(Parts, parts))
    outcome = await reconciler._apply(canary.deployment, observed, canary.decision, Pending(urgent=True), canary.now)
    return outcome, table


async def test_the_rollout_is_written_before_state_and_plan() -> None:
    cluster = Cluster()
    outcome, table = await carried_out(cluster, trying())
    assert cluster.writes[:3] == ["ConfigMap/demo-drafts", "ConfigMap/demo-state", "ConfigMap/demo-plan"]
    state = table.get(("ns", "demo"))
    assert outcome.is_saved
    assert state is not None
    assert state.published is not None


async def test_a_rollout_that_cannot_be_stored_does_not_begin() -> None:
    cluster = Cluster()
    cluster.down = {"demo-drafts"}
    outcome, table = await carried_out(cluster, trying())
    assert not {"ConfigMap/demo-plan", "ConfigMap/demo-state"} & set(cluster.writes)
    assert "Deployment/demo-worker" in cluster.writes, "the other children do not wait"
    state = table.get(("ns", "demo"))
    assert not outcome.is_saved
    assert state is not None
    assert state.published is None


async def test_the_job_is_created_after_the_run_is_stored() -> None:
    cluster, canary = Cluster(), distilling()
    assert canary.record.run is not None
    job = f"Job/demo-distill-{canary.record.run.id}"
    outcome, _ = await carried_out(cluster, canary)
    assert cluster.writes.index("ConfigMap/demo-drafts") < cluster.writes.index("ConfigMap/demo-state")
    assert cluster.writes[-1] == job
    assert outcome.job_problem == ""


@pytest.mark.parametrize("down", ["demo-drafts", "demo-state"])
async def test_no_job_is_created_for_a_run_that_cannot_be_stored(down: str) -> None:
    cluster = Cluster()
    cluster.down = {down}
    outcome, _ = await carried_out(cluster, distilling())
    assert not outcome.is_saved
    assert not any(write.startswith("Job/") for write in cluster.writes)


async def test_a_refused_command_is_stored_so_that_it_is_not_carried_out_after_a_restart() -> None:
    quiet = capturing(distillation={"storage": None})
    commanded = capturing(distillation={"storage": None})
    commanded.command("distill")
    commanded.tick()
    for canary, is_stored in ((quiet, False), (commanded, True)):
        cluster = Cluster()
        await carried_out(cluster, canary)
        assert ("ConfigMap/demo-drafts" in cluster.writes) == is_stored
