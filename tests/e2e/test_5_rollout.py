"""A rollout: no request is rejected, and in float32 the text is the same, however good the draft is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdecode_worker.contract import SyntheticKnobs
from support.e2e.endpoint import Endpoint
from support.e2e.traffic import Traffic, answers
from support.kube import wait_for
from support.tiers import skip_reason

UNLUCKY = SyntheticKnobs(acceptance=(0.1,))


@pytest.fixture(scope="module", autouse=True)
def fixed_depth(endpoint: Endpoint) -> Iterator[None]:
    """Pin the depth, because the control loop would stop drafts that are rarely accepted."""
    endpoint.patch({"speculation": {"mode": "Static"}})
    yield
    endpoint.patch({"speculation": {"mode": "Auto"}})


@pytest.mark.timeout(300)
def test_rollout_refuses_no_request(endpoint: Endpoint, url: str, model: str) -> None:
    (old,) = endpoint.ready_pods()
    with Traffic(url, model, concurrency=1, max_tokens=16) as traffic:
        # The length changes the pod template where the dtype is float32 already.
        endpoint.patch({"engine": {"dtype": "float32", "maxModelLen": 1000}})
        wait_for("the old pod is gone", lambda: old not in endpoint.all_pods(), timeout_s=200)
        finished = traffic.finished
        if not endpoint.namespace.cluster.local:
            pytest.skip(skip_reason("local cluster", "a forwarded port ends with its pod"))
        wait_for("the new pod answers", lambda: traffic.finished > finished + 2, timeout_s=30)
    assert not traffic.failures


@pytest.mark.timeout(300)
def test_text_is_unchanged_when_acceptance_falls(endpoint: Endpoint, url: str, model: str) -> None:
    before = answers(url, model)
    good = endpoint.report()
    endpoint.set_knobs(UNLUCKY)
    try:
        during = answers(url, model)
    finally:
        endpoint.set_knobs(None)
    bad = endpoint.report()
    assert before == during
    assert bad.drafts > good.drafts, "drafts were verified meanwhile"
    cut = (bad.accepted_tokens - good.accepted_tokens) / (bad.drafts - good.drafts)
    assert cut < 0.5 * good.accepted_tokens / good.drafts, "the knob did cut them"
