"""Row 11: after the Secrets of a deployment are deleted, the operator reaches its workers again without a restart."""

from __future__ import annotations

import pytest

from support.kube import wait_for
from support.operator_faults.client_traffic import clients_of
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

LIMIT_SECONDS = 30


def secrets_of(served: ServedDeployment) -> list[str]:
    labels = f"specdecode.io/name={served.name}"
    return [secret["metadata"]["name"] for secret in served.api.list("secret", served.namespace, labels)]


@pytest.mark.timeout(240)
def test_workers_are_reached_after_their_secrets_are_deleted(tenant: Tenant, figures: Figures) -> None:
    with tenant.deployment("tokens", replicas=2, behaviour={"check_tokens": True}) as served:
        version, restarts = served.settled_plan_version(), served.restarts()
        assert all(served.worker_state(pod)["unauthorized"] == 0 for pod in served.pods())
        names = secrets_of(served)
        assert names, "the operator made a Secret for its workers"
        with clients_of(served) as clients:
            for name in names:
                served.api.delete("secret", served.namespace, name)
            served.patch({"speculation": {"depth": {"initial": 2, "max": 4}}})

            def are_planned() -> bool:
                refusals = [served.worker_state(pod)["unauthorized"] for pod in served.pods()]
                assert min(served.plan_versions()) > version, f"workers answered 401 to {refusals} requests"
                return True

            figures.record_seconds(11, "workers take a new plan", are_planned, limit_s=LIMIT_SECONDS)
            wait_for("clients go on", lambda: clients.answered > 10, timeout_s=LIMIT_SECONDS)
        assert served.restarts() == restarts, "workers were restarted"
        assert not clients.failures, clients.failures[:5]
        # The operator may not read Secrets. It creates them again when a new worker needs them.
        gone = served.pods()[0]["metadata"]["name"]
        served.api.delete("pod", served.namespace, gone)

        def is_replaced() -> bool:
            running = [pod["metadata"]["name"] for pod in served.pods()]
            return secrets_of(served) == names and gone not in running and len(running) == 2

        figures.record_seconds(11, "a new worker has its Secret and runs", is_replaced, limit_s=2 * LIMIT_SECONDS)
