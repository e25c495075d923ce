"""Detection of an acceptance collapse on one of two workers: it is named, runs without speculation, and recovers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import PROOF, SETTLED_SECONDS, deployed, knobs, steps
from support.e2e.release import Release
from support.e2e.traffic import Traffic
from support.kube import wait_for

pytestmark = [PROOF, pytest.mark.timeout(900)]

FAIR = knobs(steps(node_seconds=0.01))
COLLAPSED = knobs(steps(node_seconds=0.01), acceptance=(0.05,))
PAST_DRAFTS = 220


@pytest.fixture
def endpoint(release: Release, watched: Namespace) -> Iterator[Endpoint]:
    release.start()
    with deployed(watched, "pair", {}, {}, knobs=FAIR, replicas=2) as endpoint:
        wait_for("two workers", lambda: len(endpoint.ready_pods()) == 2, timeout_s=180, every_s=2)
        yield endpoint


def past_drafts(endpoint: Endpoint) -> list[float]:
    """Return the number of first draft tokens in each worker's recorded history."""
    return [sum(task["past_total"] for task in pod["tasks"]) for pod in endpoint.state()["pods"]]


def test_acceptance_collapse_is_detected_named_and_cleared(endpoint: Endpoint) -> None:
    sick, well = sorted(endpoint.ready_pods())
    with (
        endpoint.namespace.reach("service", endpoint.name, 80) as url,
        Traffic(url, MODEL, concurrency=4, max_tokens=48) as traffic,
    ):
        wait_for(
            "both have a past",
            lambda: len(drafts := past_drafts(endpoint)) == 2 and min(drafts) > PAST_DRAFTS,
            timeout_s=SETTLED_SECONDS,
        )
        assert endpoint.condition("WorkersHealthy")["status"] == "True"
        endpoint.set_knobs(COLLAPSED, sick)

        def named() -> bool:
            condition = endpoint.condition("WorkersHealthy")
            assert (condition["status"], condition["reason"]) == ("False", "AcceptanceCollapsed"), condition
            assert f"pod {sick}: first token accepted" in condition["message"], condition
            assert well not in condition["message"], condition
            return True

        wait_for("it is named", named, timeout_s=SETTLED_SECONDS)
        wait_for("it runs plainly", lambda: endpoint.report(sick).plan.quiet, timeout_s=30)
        assert not endpoint.report(well).plan.quiet
        endpoint.set_knobs(FAIR, sick)
        wait_for(
            "it is well", lambda: endpoint.condition("WorkersHealthy")["status"] == "True", timeout_s=SETTLED_SECONDS
        )
        wait_for("it speculates", lambda: not endpoint.report(sick).plan.quiet, timeout_s=30)
    assert not traffic.failures
    events = {
        e["reason"]: e["type"] for e in endpoint.namespace.list("events") if e["involvedObject"]["name"] == "pair"
    }
    assert events.get("AcceptanceCollapsed") == "Warning", events
