"""Row 16, first part: a deleted child returns within five seconds."""

from __future__ import annotations

import time

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import Tenant

CHILDREN = (("deployment", "-worker"), ("service", ""), ("configmap", "-plan"), ("pdb", "-worker"))
LIMIT_SECONDS = 5
PATIENCE_SECONDS = 75
"""The measurement goes on after the limit, so that the record says how long it really takes."""


def test_deleted_children_return(tenant: Tenant, figures: Figures) -> None:
    with tenant.deployment("deleted", ready=False, replicas=0) as served:
        wait_for("children exist", lambda: all(served.child(*child) for child in CHILDREN), timeout_s=30)
        seconds = {}
        uids = {child: served.child(*child)["metadata"]["uid"] for child in CHILDREN}
        started = time.monotonic()
        for kind, suffix in CHILDREN:
            served.api.delete(kind, served.namespace, served.name + suffix)
        while len(seconds) < len(CHILDREN) and time.monotonic() < started + PATIENCE_SECONDS:
            for child in CHILDREN:
                now = served.child(*child)
                if child not in seconds and now and now["metadata"]["uid"] != uids[child]:
                    seconds[child] = time.monotonic() - started
            time.sleep(0.1)
        for kind, suffix in CHILDREN:
            figures.record(16, f"seconds until a deleted {kind} returns", seconds.get((kind, suffix), "never"))
        assert len(seconds) == len(CHILDREN), f"after {PATIENCE_SECONDS} s only {seconds}"
        assert max(seconds.values()) < LIMIT_SECONDS, seconds
