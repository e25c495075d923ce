"""The planner without synthetic knobs, on real steps and drafts: shapes by load, and a row of a customer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest

from specdecode_operator.plugin.cli import main
from specdecode_worker.contract import OTHER_TASK, Port
from support.e2e.endpoint import MODEL, ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed, names_load, planned_shape
from support.e2e.traffic import Traffic
from support.kube import Manifest, wait_for

pytestmark = [pytest.mark.proof("planner"), pytest.mark.timeout(1800)]

HELD_ANSWERS = 40
MEASURED = {"timeout_s": 600, "every_s": 5}
"""Each look at the plan takes some kubectl calls, which cost the workers a tenth of a second of their cores."""
MANY = ">4"
"""Name of the load of eight requests: the last bucket of a worker of eight."""
ENGINE = {"maxNumSeqs": 8, "kvCacheTokens": 8192}
BOTH_CORES = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {**ONE_CORE["limits"], "cpu": "2"}}
"""Two cores wait for the weights at one request, so that a node more costs little. One core is busy with each node."""


def held(traffic: Traffic, condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return a condition: the given one holds at every look for HELD_ANSWERS, in which a trial ends."""
    since = traffic.count()

    def holds() -> bool:
        nonlocal since
        if not condition():
            since = traffic.count()
        return traffic.count() - since >= HELD_ANSWERS

    return holds


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
    with deployed(watched, "shapes", {}, {"resources": BOTH_CORES}, engine=ENGINE) as endpoint:

        def explained(load: str) -> bool:
            """Return whether `explain` names the last change, of this load, with what was measured."""
            why, said = changes(endpoint, load)[0]["reason"], explanation(endpoint, capsys)
            print(said)
            assert " ms" in why
            return why in " ".join(said.split())

        with endpoint.traffic(1, max_tokens=128) as one:
            kept = held(one, lambda: not planned_shape(endpoint, 1).is_chain)
            wait_for("a tree for one", kept, **MEASURED)
            wait_for("explain says why", lambda: explained("1"), timeout_s=60, every_s=5)
        with endpoint.traffic(8, max_tokens=128):
            wait_for(
                "a chain or nothing for eight, as measured",
                lambda: planned_shape(endpoint, 8).is_chain and changes(endpoint, MANY),
                **MEASURED,
            )
            wait_for("explain says why", lambda: explained(MANY), timeout_s=60, every_s=5)


SECRET, KEYS = "strangers", {"acme": "key-of-acme", "globex": "key-of-globex"}
EASY = (
    "Write one hundred random letters and digits.",
    "Invent a password of fifty random characters.",
    "List thirty made-up names of stars.",
    "Give me twenty random hexadecimal numbers.",
)
"""The model soon repeats itself: more than two of three tokens of the draft are accepted."""
THAI = (
    "เล่าเรื่องสั้นเกี่ยวกับคนเฝ้าประภาคาร",
    "ทำไมท้องฟ้าถึงเป็นสีฟ้า",
    "บอกชื่อเมืองห้าเมือง",
    "แต่งกลอนหนึ่งบท",
)
"""The draft was trained on English: less than one token of ten is accepted."""


def customer(url: str, name: str, prompts: Sequence[str]) -> Traffic:
    """Return a client that asks with the API key of one customer."""
    key = {"Authorization": f"Bearer {KEYS[name]}"}
    return Traffic(url, MODEL, concurrency=1, prompts=prompts, headers=key)


def test_a_customer_whose_texts_the_draft_does_not_know_goes_to_off_alone(
    watched: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": KEYS}
    watched.kubectl("apply", "--filename", "-", stdin=json.dumps(secret))
    tasks = [{"name": "acme", "clients": ["acme"]}]
    keys = {"name": SECRET}
    with deployed(
        watched, "strangers", {"tasks": tasks}, {"resources": ONE_CORE}, engine=ENGINE, apiKeysSecretRef=keys
    ) as endpoint, watched.reach("pod", endpoint.one_pod(), Port.http) as url:  # fmt: skip
        with customer(url, "globex", EASY) as known, customer(url, "acme", THAI) as unknown:
            apart = held(known, lambda: is_off(endpoint, "acme") and not is_off(endpoint, OTHER_TASK))
            wait_for("acme alone runs plainly", apart, **MEASURED)
        print(explanation(endpoint, capsys))
        assert known.failures + unknown.failures == []
    watched.kubectl("delete", "secret", SECRET)


def is_off(endpoint: Endpoint, task: str) -> bool:
    """Return whether the task has a row of its own at the load of both customers, which is plain."""
    assert task in {row.task for row in endpoint.plan().rows}
    return not planned_shape(endpoint, 2, task).nodes
