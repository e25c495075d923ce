"""Tests of a prefill worker on the cluster: text and acceptance do not change, and its faults fail no request.

Proof: ``make proofs P=prefill``. While answers are compared the deployment is paused and the test pushes the plans, so
that every step has the same shape with and without the prefill worker.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from specdecode_worker.contract import Port, Route, TreeShape
from support.client_threads import ClientThreads
from support.e2e.endpoint import MODEL, ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed
from support.e2e.traffic import PROMPTS
from support.e2e.worker_faults import kill_pod, signal_engine
from support.kube import wait_for

NAME = "apart"
COUNT, AT_ONCE, TOKENS = 200, 4, 24
pytestmark = [pytest.mark.timeout(3600), pytest.mark.proof("prefill")]


@pytest.fixture(scope="module")
def apart(watched: Namespace) -> Iterator[Endpoint]:
    speculation = {"draft": {"uri": "embedded://smollm2-135m-instruct-eagle3"}, "depth": {"initial": 3}}
    # Half of a slow core takes more than the usual ten seconds for a long prompt, which an updated worker is to end.
    drain = {"endpointDelay": "1s", "gracePeriod": "2m"}
    workers = {"resources": ONE_CORE}
    with deployed(watched, NAME, speculation, workers, prefill={"replicas": 1}, drain=drain) as endpoint:
        wait_for("a prefill worker is ready", lambda: endpoint.ready_pods("prefill"), timeout_s=300, every_s=2)
        wait_for("its address is published", lambda: endpoint.plan().prefill != (), timeout_s=60)
        yield endpoint


def prompt(index: int) -> str:
    """Return a prompt of some hundred tokens that shares no beginning with another one."""
    return f"Number {index}. " + " ".join(PROMPTS[(index + k) % len(PROMPTS)] for k in range(24))


def complete(url: str, index: int, salt: str) -> tuple[str, int, int]:
    body = {"model": MODEL, "prompt": prompt(index), "max_tokens": TOKENS, "seed": index, "cache_salt": salt,
            "temperature": (0.0, 0.8)[index % 2], "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    counts = result["metrics"]["speculative_decoding"]
    return result["choices"][0]["text"], counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]


def test_prefill_worker_is_shown_and_is_in_no_service(apart: Endpoint) -> None:
    (pod,) = apart.ready_pods("prefill")
    address = apart.namespace.get("pod", pod)["status"]["podIP"]
    assert apart.plan().prefill == (f"{address}:{Port.blocks}",)
    assert apart.status()["prefill"]["readyReplicas"] == 1
    slices = apart.namespace.list("endpointslices", apart.labels)
    assert address not in {
        one for slice_ in slices for end in slice_.get("endpoints") or [] for one in end["addresses"]
    }
    wide = apart.namespace.kubectl("get", "sdd", NAME, "--output", "wide")
    assert "PREFILL" in wide.splitlines()[0]


def test_200_prompts_have_the_same_text_and_acceptance(apart: Endpoint) -> None:
    report = apart.report()
    published = apart.plan()
    apart.patch({"paused": True})
    try:
        answers = {}
        for arm, peers in (("local", ()), ("apart", published.prefill)):
            version = apart.plan().version + 1
            plan = published.model_copy(
                update={"version": version, "draft": report.draft.hash, "rows": (), "initial": TreeShape.chain(3),
                        "max_depth": 3, "explore": 0, "guard": False, "prefill": peers}
            )  # fmt: skip
            with apart.admin() as client:
                client.put(Route.plan, content=plan.model_dump_json()).raise_for_status()
            with apart.namespace.reach("service", NAME, 80) as url, ThreadPoolExecutor(AT_ONCE) as pool:
                answers[arm] = list(pool.map(lambda index: complete(url, index, arm), range(COUNT)))  # noqa: B023
        after = apart.report()
    finally:
        apart.patch({"paused": False})
    came = after.remote_prefill_tokens - report.remote_prefill_tokens
    asked = after.remote_prefills - report.remote_prefills
    print(f"\n{asked} of {COUNT} prompts from the prefill worker, {came} tokens, {after.remote_prefill_bytes} bytes")
    assert answers["apart"] == answers["local"]
    assert sum(accepted for *_, accepted in answers["local"]) > COUNT
    assert asked > COUNT / 2


class LongPrompts(ClientThreads):
    """Clients that ask with long prompts, one after the other, while a block runs."""

    def __init__(self, url: str) -> None:
        super().__init__(AT_ONCE, join_seconds=180)
        self._url = url

    def _ask(self, number: int) -> str:
        complete(self._url, 10_000 + number, "load")
        return ""


def stop(endpoint: Endpoint, pod: str) -> None:
    signal_engine(endpoint, pod, signal.SIGSTOP)


def restart(endpoint: Endpoint, pod: str) -> None:
    endpoint.namespace.kubectl("delete", "pod", pod)


def update(endpoint: Endpoint, pod: str) -> None:
    endpoint.patch({"workers": {"template": {"metadata": {"annotations": {"example.com/roll": pod}}}}})


@pytest.mark.parametrize("fault", [kill_pod, stop, restart, update])
def test_faults_of_the_prefill_worker_cost_no_request(fault: Any, apart: Endpoint) -> None:
    (pod,) = apart.ready_pods("prefill")
    with apart.namespace.reach("service", NAME, 80) as url, LongPrompts(url) as clients:
        clients.wait_for_answers(AT_ONCE, 300)
        fault(apart, pod)
        clients.wait_for_answers(3 * AT_ONCE, 300)
        if fault is stop:
            kill_pod(apart, pod)
        wait_for("another prefill worker is ready", lambda: _another(apart, pod), timeout_s=300, every_s=2)
        clients.wait_for_answers(AT_ONCE, 300)
    print(f"\n{fault.__name__} of the prefill worker: {clients.answered} answers, {len(clients.failures)} failed")
    assert clients.failures == []


def _another(endpoint: Endpoint, old: str) -> bool:
    """Return whether the only prefill worker that is ready is another one than before."""
    (ready,) = endpoint.ready_pods("prefill")
    return ready != old
