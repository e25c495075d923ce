"""Row 11: after the Secrets of a deployment are deleted, the operator reaches its workers again without a restart."""

from __future__ import annotations

import time

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
            started = time.monotonic()
            served.patch({"speculation": {"depth": {"initial": 2, "max": 4}}})
            try:
                wait_for("both take a new plan", lambda: min(served.plan_versions()) > version, timeout_s=LIMIT_SECONDS)
                figures.record(11, "seconds until workers take a new plan", time.monotonic() - started)
            except AssertionError:
                refusals = [served.worker_state(pod)["unauthorized"] for pod in served.pods()]
                figures.record(11, "seconds until workers take a new plan", f"not within {LIMIT_SECONDS}")
                raise AssertionError(f"workers answered 401 to {refusals} requests") from None
            wait_for("clients go on", lambda: clients.answered > 10, timeout_s=LIMIT_SECONDS)
        assert served.restarts() == restarts, "workers were restarted"
        assert not clients.failures, clients.failures[:5]
        # The operator may not read Secrets. It creates them again when a new worker needs them.
        gone = served.pods()[0]["metadata"]["name"]
        served.api.delete("pod", served.namespace, gone)
        started, label = time.monotonic(), "seconds until a new worker has its Secret"

        def is_replaced() -> bool:
            running = [pod["metadata"]["name"] for pod in served.pods()]
            return secrets_of(served) == names and gone not in running and len(running) == 2

        try:
            wait_for("a new worker runs", is_replaced, timeout_s=2 * LIMIT_SECONDS)
            figures.record(11, label, time.monotonic() - started)
        except AssertionError:
            figures.record(11, label, f"not within {2 * LIMIT_SECONDS}")
            raise
