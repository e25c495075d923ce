"""Constant traffic of eight clients through a fault that they must not notice, and the status afterwards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from support.e2e.traffic import Traffic
from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment

SETTLE_SECONDS = 10
RECOVERY_SECONDS = 30
DRAIN = {"endpointDelay": "2s", "gracePeriod": "5s"}


def clients_of(served: ServedDeployment) -> Traffic:
    """Return clients that ask through the Service of a deployment, each request over a new connection."""
    url = f"http://{served.child('service')['spec']['clusterIP']}"
    return Traffic(url, "stand-in", concurrency=8, prompts=("hello",), pause_seconds=0.1, timeout_s=20)


@contextmanager
def constant_clients(served: ServedDeployment) -> Iterator[Traffic]:
    """Yield running clients; they go on for some seconds after the block."""
    with clients_of(served) as clients:
        # After an outage of the API server, kube-proxy learns of a new Service up to two minutes late.
        wait_for("traffic", lambda: clients.answered > 8, timeout_s=120)
        clients.failures.clear()
        yield clients
        time.sleep(SETTLE_SECONDS)


@contextmanager
def unnoticed(served: ServedDeployment, figures: Figures, label: str) -> Iterator[Traffic]:
    """Yield running clients. Afterwards their failures are recorded and must be none."""
    with constant_clients(served) as clients:
        yield clients
    figures.record("traffic", f"{label}: failed of requests", f"{len(clients.failures)} of {clients.answered}")
    assert not clients.failures, Counter(clients.failures)
    assert clients.answered > 50


def assert_status_true(served: ServedDeployment, figures: Figures, label: str) -> None:
    """Assert that status is Ready and current again in time, after a change that only a living operator sees."""
    changes: list[object] = []

    def is_true() -> bool:
        if not changes:
            changes.append(served.patch({"speculation": {"depth": {"max": 4}}}))
        return served.is_condition("Ready", "True")

    figures.record_seconds("traffic", f"{label}: a true status", is_true, limit_s=RECOVERY_SECONDS)
