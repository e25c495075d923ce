"""ACCEPT and SPEEDUP of `kubectl get sdd` match the workers' own counters and `bench` in the pod."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from specdecode_worker.contract import Metric
from support.e2e.endpoint import EQUAL_STEPS, Endpoint
from support.e2e.traffic import PROMPTS
from support.kube import wait_for
from support.processor import FASTEST_DTYPE, MULTIPLIES_BF16
from support.tiers import skip_reason

DEPTH = 1
"""Depth that gains on every processor with bfloat16 instructions.

Where a shape loses, the guard lets only bursts speculate, and SPEEDUP would be the speedup of those bursts. On other
processors no depth is sure to gain: steps are padded there, and ``bench`` has nothing to compare.
"""
CONCURRENCY = 2 if MULTIPLIES_BF16 else 4
"""More requests at once give a slow processor the 500 drafts a minute from which status has an acceptance rate."""
QUESTIONS = PROMPTS[:4]
"""Prompts used both for the traffic and for bench, because acceptance depends on the text."""
MAX_TOKENS = 64
WINDOW_SECONDS = 60
MIN_DRAFTED = 500
"""Drafted tokens from which the acceptance rate is compared; a slow processor gets up to three windows for them."""
ROUNDS = 3
"""Rounds of bench.

One round has four seconds of plain steps, so one second of load from a neighbouring process would distort a quarter of
it.
"""


def speculation_counters(endpoint: Endpoint) -> tuple[float, float]:
    """Return the (drafted, accepted) tokens so far, from /metrics of the one worker."""
    with endpoint.namespace.reach("pod", endpoint.one_pod(), 8000) as url:
        text = httpx.get(f"{url}/metrics", trust_env=False, timeout=20).raise_for_status().text
    sums = {family.name: sum(s.value for s in family.samples) for family in text_string_to_metric_families(text)}
    return sums[Metric.num_draft_tokens], sums[Metric.num_accepted_tokens]


@pytest.fixture(scope="module")
def measured(endpoint: Endpoint) -> tuple[float, dict[str, float]]:
    """Return the acceptance rate from /metrics over a minute of traffic, and status.speculation at its end.

    Both are measured at one fixed depth.
    """
    endpoint.patch({"speculation": {"mode": "Static", "depth": {"initial": DEPTH}}})
    endpoint.set_knobs(None if MULTIPLIES_BF16 else EQUAL_STEPS)
    with endpoint.traffic(CONCURRENCY, max_tokens=MAX_TOKENS, prompts=QUESTIONS):
        time.sleep(20)
        drafted, accepted = drafted_after, accepted_after = speculation_counters(endpoint)
        deadline = time.monotonic() + 3 * WINDOW_SECONDS
        while drafted_after - drafted <= MIN_DRAFTED and time.monotonic() < deadline:
            time.sleep(WINDOW_SECONDS)
            drafted_after, accepted_after = speculation_counters(endpoint)
        wait_for("SPEEDUP is measured", lambda: endpoint.speculation().get("speedup"), timeout_s=60)
        speculation = endpoint.speculation()
    endpoint.set_knobs(None)
    assert drafted_after - drafted > MIN_DRAFTED, "too little traffic to measure anything"
    return (accepted_after - accepted) / (drafted_after - drafted), speculation


@pytest.mark.timeout(420)
def test_accept_equals_the_workers_own_counters(measured: tuple[float, dict[str, float]]) -> None:
    by_metrics, status = measured
    assert 0.1 < by_metrics < 1
    assert abs(status["acceptanceRate"] - by_metrics) <= 0.05


@pytest.mark.skipif(not MULTIPLIES_BF16, reason=skip_reason("bf16", "without its instructions drafts need not gain"))
@pytest.mark.timeout(300)
def test_speedup_is_what_bench_measures_in_the_pod(
    endpoint: Endpoint, measured: tuple[float, dict[str, float]]
) -> None:
    """There is no traffic meanwhile, because bench runs its own engine under the pod's CPU limit."""
    pod = endpoint.one_pod()
    lines = "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in QUESTIONS)
    endpoint.namespace.exec(pod, "sh", "-c", "cat > /tmp/prompts.jsonl", stdin=lines)
    flags = ["--dtype", FASTEST_DTYPE, "--threads", "1", "--depth", str(DEPTH), "--concurrency", str(CONCURRENCY)]
    command = ["specdecode-worker", "bench", "--json", "--prompts", "/tmp/prompts.jsonl"]
    cache = ["--cache-dir", "/var/cache/specdecode", "--max-tokens", str(MAX_TOKENS), "--rounds", str(ROUNDS)]
    document = json.loads(endpoint.namespace.exec(pod, *command, *flags, *cache, timeout_s=240))
    (level,) = document["concurrency"].values()
    _, status = measured
    # SPEEDUP compares steps of one load. The ratio that bench prints also counts the ends of its waves, where requests
    # run alone.
    steps = level["plain"]["step_milliseconds"] / level["speculative"]["step_milliseconds"]
    assert status["speedup"] == pytest.approx(steps * level["tokens_per_step"], rel=0.15), level
