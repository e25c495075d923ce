"""Row 15: a change of the workers' draft keeps what was learned about the draft before."""

from __future__ import annotations

import time

import pytest

from specdecode_operator.state.learned import AcceptanceCell, parse_state
from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant

FIRST, SECOND = "draft-a", "draft-b"


def stored_drafts(served: ServedDeployment) -> dict[str, tuple[AcceptanceCell, ...]]:
    """Return the acceptance in the state ConfigMap, by draft hash."""
    state = served.child("configmap", "-state")
    assert state, "no state was written"
    learned = parse_state(state["data"], state["metadata"]["ownerReferences"][0]["uid"])
    by_draft = {learned.draft: learned.acceptance} | {parked.draft: parked.acceptance for parked in learned.parked}
    return {draft: cells for draft, cells in by_draft.items() if cells}


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
