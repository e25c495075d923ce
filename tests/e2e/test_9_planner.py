"""The planner without synthetic knobs, on steps and drafts of one core: shapes by load, and a row of a customer."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from specdecode_operator.plugin.cli import main
from specdecode_worker.contract import OTHER_TASK, Port
from support.e2e.endpoint import MODEL, ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed, names_load, planned_shape
from support.e2e.traffic import PROMPTS, Traffic
from support.kube import Manifest, wait_for

pytestmark = [pytest.mark.proof("planner"), pytest.mark.timeout(1800)]

MEASURED_SECONDS = 600
MANY = ">4"
"""Name of the load of eight requests: the last bucket of a worker of eight."""
ENGINE = {"maxNumSeqs": 8, "kvCacheTokens": 8192}
WORKERS = {"resources": ONE_CORE}


def changes(endpoint: Endpoint, load: str) -> list[Manifest]:
    """Return the changes of the row of this load, newest first."""
    return [one for one in endpoint.speculation().get("history", []) if names_load(one, load)]


def explanation(endpoint: Endpoint, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `kubectl specdecode explain` says."""
    kubeconfig = endpoint.namespace.cluster.kubeconfig
    flags = [*(["--kubeconfig", kubeconfig] if kubeconfig else []), "--namespace", endpoint.namespace.name]
    assert main(["explain", *flags, endpoint.name]) == 0
    return capsys.readouterr().out


def test_a_tree_for_one_request_and_a_chain_or_nothing_for_eight(
    watched: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with deployed(watched, "shapes", {}, WORKERS, engine=ENGINE) as endpoint:

        def explained(load: str) -> bool:
            """Return whether `explain` names the last change, of this load, with what was measured."""
            why, said = changes(endpoint, load)[0]["reason"], explanation(endpoint, capsys)
            print(said)
            assert " ms" in why
            return why in " ".join(said.split())

        with endpoint.traffic(1, max_tokens=128):
            wait_for("a tree for one", lambda: not planned_shape(endpoint, 1).is_chain, timeout_s=MEASURED_SECONDS)
            wait_for("explain says why", lambda: explained("1"), timeout_s=60, every_s=5)
        with endpoint.traffic(8, max_tokens=128):
            wait_for(
                "a chain or nothing for eight, as measured",
                lambda: planned_shape(endpoint, 8).is_chain and changes(endpoint, MANY),
                timeout_s=MEASURED_SECONDS,
            )
            wait_for("explain says why", lambda: explained(MANY), timeout_s=60, every_s=5)


SECRET, KEYS = "strangers", {"acme": "key-of-acme", "globex": "key-of-globex"}
JAPANESE = (
    "灯台守についての短い話を書いてください。",
    "なぜ空は青いのですか。",
    "日本の都市を五つ挙げてください。",
    "俳句を一つ作ってください。",
)
"""The draft was trained on English: a token of its in these answers is accepted one time in five."""


def customer(url: str, name: str, prompts: Sequence[str]) -> Traffic:
    """Return clients that ask with the API key of one customer, at temperature 1."""
    key = {"Authorization": f"Bearer {KEYS[name]}"}
    return Traffic(url, MODEL, concurrency=2, max_tokens=96, prompts=prompts, temperature=1, headers=key)


def test_a_customer_whose_texts_the_draft_does_not_know_goes_to_off_alone(
    watched: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": KEYS}
    watched.kubectl("apply", "--filename", "-", stdin=json.dumps(secret))
    tasks = [{"name": "acme", "clients": ["acme"]}]
    keys = {"name": SECRET}
    with deployed(
        watched, "strangers", {"tasks": tasks}, WORKERS, engine=ENGINE, apiKeysSecretRef=keys
    ) as endpoint, watched.reach("pod", endpoint.one_pod(), Port.http) as url:  # fmt: skip
        with customer(url, "globex", PROMPTS) as known, customer(url, "acme", JAPANESE) as unknown:
            wait_for("acme runs plainly", lambda: is_off(endpoint, "acme"), timeout_s=MEASURED_SECONDS)
            wait_for("globex speculates", lambda: not is_off(endpoint, OTHER_TASK), timeout_s=MEASURED_SECONDS)
            known.wait_for_answers(20)
            assert is_off(endpoint, "acme")
            assert not is_off(endpoint, OTHER_TASK)
        print(explanation(endpoint, capsys))
        assert known.failures + unknown.failures == []
    watched.kubectl("delete", "secret", SECRET)


def is_off(endpoint: Endpoint, task: str) -> bool:
    """Return whether the task has a row of its own at the load of both customers, which is plain."""
    assert task in {row.task for row in endpoint.plan().rows}
    return not planned_shape(endpoint, 4, task).nodes
