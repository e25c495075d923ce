"""Row 15: a change of the workers' draft keeps what was learned about the draft before."""

from __future__ import annotations

import json
import time

import pytest

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

FIRST, SECOND = "draft-a", "draft-b"


def stored_drafts(served: ServedDeployment) -> dict[str, str]:
    """Return the estimates in the state ConfigMap as text, by draft hash, for both formats of the ConfigMap.

    The format before sections has the estimates of one draft in ``memory.json``; later ones have a key
    ``estimates.<draft hash>`` per draft.
    """
    state = served.child("configmap", "-state")
    assert state, "no state was written"
    data = state["data"]
    prefix = "estimates."
    drafts = {key.removeprefix(prefix): text for key, text in data.items() if key.startswith(prefix)}
    if "memory.json" in data:
        memory = json.loads(data["memory.json"])
        drafts |= {memory["draft"]: json.dumps(memory["acceptance"])} if memory["acceptance"] else {}
    return drafts


def switch(served: ServedDeployment, draft: str) -> None:
    """Let two of three workers change their draft, and wait until the plan follows."""
    for pod in served.pods()[:2]:
        served.behave(pod, draft=draft)

    def follows() -> bool:
        plans = [served.worker_state(pod)["plan"]["draft"] for pod in served.pods()]
        assert set(plans) == {draft}, plans
        return True

    wait_for(f"the plan is made for {draft}", follows, timeout_s=60)


@pytest.mark.timeout(400)
def test_estimates_of_the_first_draft_survive_a_switch(tenant: Tenant, figures: Figures) -> None:
    with tenant.deployment("drafts", replicas=3, behaviour={"running": 1}) as served:
        wait_for("estimates are stored", lambda: FIRST in stored_drafts(served), timeout_s=90)
        switch(served, SECOND)
        wait_for("the second draft is stored", lambda: SECOND in stored_drafts(served), timeout_s=90)
        during = sorted(stored_drafts(served))
        figures.record(15, "drafts with estimates after a switch", ", ".join(during))
        started = time.monotonic()
        switch(served, FIRST)
        figures.record(15, "seconds to a plan for the first draft again", time.monotonic() - started)
        after = stored_drafts(served)
        assert {FIRST, SECOND} <= set(during), "what was learned about the first draft is gone"
        assert after.get(FIRST)
