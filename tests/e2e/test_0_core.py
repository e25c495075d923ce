"""The main path on a real cluster, from `kubectl apply` to a deletion that leaves nothing: the end of `make test`.

One deployment of two workers behind two routers runs through all of it, test by test. Clients repeat nothing by
themselves, and every answer is compared with the one that came while nothing happened.
"""

from __future__ import annotations

import copy
import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdecode_worker.contract import StepTime, SyntheticKnobs, TreeShape
from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import assert_explained, names_load, planned_depth
from support.e2e.release import ASSIGNED_USER, Release
from support.e2e.routed import Routed, routed_deployment
from support.e2e.streams import connect
from support.e2e.worker_faults import kill_pod, restarts, signal_engine, swap_draft, wait_for_ready_pods
from support.kube import wait_for

pytestmark = [pytest.mark.core, pytest.mark.timeout(600)]

NAME = "core"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ALONE, MANY = 1, 8
MANY_PER_WORKER = MANY // 2
STEP_SECONDS = 0.12
"""Duration of a padded step, longer than every real one of a worker with one core."""
LOADED_COSTS_MORE = SyntheticKnobs(
    step_time=(
        *(StepTime(max_sequences=2, max_nodes=nodes, seconds=STEP_SECONDS + 0.002 * nodes) for nodes in range(5)),
        *(StepTime(max_nodes=nodes, seconds=STEP_SECONDS + 0.2 * nodes) for nodes in range(5)),
        StepTime(seconds=STEP_SECONDS + 0.8),
    )
)
"""Step times of a large model on a GPU, exaggerated: drafts are almost free for few sequences, and costly for many.

The load is real and so is the decision. A small model on a processor core has the same gap, but too small a one to be
measured within a minute.
"""


@pytest.fixture(scope="module")
def routed(watched: Namespace) -> Iterator[Routed]:
    user = {"securityContext": ASSIGNED_USER}
    with routed_deployment(watched, NAME, workers={"template": {"spec": user}}, router_pods=user) as routed:
        yield routed


@pytest.fixture
def endpoint(routed: Routed) -> Endpoint:
    return routed.endpoint


def test_applied_deployment_is_ready_and_its_columns_say_so(endpoint: Endpoint) -> None:
    endpoint.wait_condition("DraftCompatible", "True")
    status = endpoint.status()
    assert endpoint.condition("Ready")["status"] == "True"
    assert status["observedGeneration"] == endpoint.get()["metadata"]["generation"]
    assert status["ready"] == "2/2"
    assert status["draft"]["hash"]
    header, row = (line.split() for line in endpoint.namespace.kubectl("get", "sdd", NAME).splitlines())
    assert header == ["NAME", "READY", "MODE", "DEPTH", "ACCEPT", "SPEEDUP", "AGE", "REASON"]
    assert row[:3] == [NAME, "2/2", "Auto"]


def test_every_pod_runs_as_an_assigned_user_under_the_restricted_profile(release: Release, watched: Namespace) -> None:
    for namespace, count in ((release.namespace, 2), (watched, 4)):
        pods = namespace.list("pods")
        assert [pod["spec"]["securityContext"]["runAsUser"] for pod in pods] == count * [ASSIGNED_USER["runAsUser"]]
        # The API server names every pod that the label would refuse.
        profile = "pod-security.kubernetes.io/enforce=restricted"
        namespace.kubectl("label", "namespace", namespace.name, profile, "--dry-run=server", "--warnings-as-errors")


def test_chat_answer_streams_through_the_routers(routed: Routed) -> None:
    client = connect(routed.url)
    words: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**words)
    chunks = list(client.chat.completions.create(**words, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 1, "in one piece"  # of seven tokens, of which speculation may bring five in a step
    streamed, counted = chunks[-1].usage, whole.usage
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (counted.prompt_tokens, counted.completion_tokens)
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(**words, modalities=["audio"])
    assert refusal.value.param == "modalities"
    assert client.models.list().data[0].id == MODEL


def test_bad_resource_is_refused_with_its_field_and_the_reason(endpoint: Endpoint) -> None:
    valid = endpoint.get()
    bad = {key: copy.deepcopy(valid[key]) for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "bad"}}
    bad["spec"]["speculation"]["depth"] = {"min": 3, "initial": 1, "max": 4}
    said = endpoint.namespace.refusal("create", "--filename", "-", stdin=json.dumps(bad))
    assert "min <= initial <= max" in said
    assert "spec.speculation" in said, "the reason names the field"


def test_depth_falls_under_load_and_rises_again_and_says_why(endpoint: Endpoint) -> None:
    def depth_under(concurrency: int, per_worker: int, least: int, most: int) -> None:
        """Send requests until the plan and DEPTH have a depth from ``least`` to ``most`` for this load."""

        def settled() -> bool:
            depths = [planned_depth(endpoint, per_worker), endpoint.depth()]
            assert all(least <= depth <= most for depth in depths), f"planned and shown: {depths}"
            return True

        with endpoint.traffic(concurrency, max_tokens=32):
            wait_for(f"depth for {concurrency} clients", settled, timeout_s=240, every_s=1)

    endpoint.set_knobs(LOADED_COSTS_MORE)
    depth_under(ALONE, 1, 2, 4)
    depth_under(MANY, MANY_PER_WORKER, 0, 1)
    depth_under(ALONE, 1, 2, 4)
    endpoint.set_knobs(None)
    largest = endpoint.plan(endpoint.ready_pods()[0]).buckets.concurrency[-1]
    history = [entry for entry in endpoint.speculation()["history"] if names_load(entry, f">{largest}")]
    falls = [entry for entry in history if _depth(entry["after"]) < _depth(entry["before"])]
    assert falls, history
    assert_explained(endpoint, falls[0])


def _depth(shape: str) -> int:
    return TreeShape.parse(shape).depth


def test_killed_engine_killed_pod_and_stopped_process_are_not_noticed_by_eight_streams(
    routed: Routed, endpoint: Endpoint
) -> None:
    with routed.unbroken_traffic("SIGKILL of an engine and of a pod, SIGSTOP of an engine", clients=8) as traffic:
        first, second = sorted(endpoint.ready_pods())
        before = restarts(endpoint, first)
        signal_engine(endpoint, first, signal.SIGKILL)
        wait_for("the worker restarted", lambda: restarts(endpoint, first) > before, timeout_s=120)
        wait_for_ready_pods(endpoint, 2)
        kill_pod(endpoint, second)
        wait_for("the pod is gone", lambda: second not in endpoint.all_pods(), timeout_s=60)
        wait_for_ready_pods(endpoint, 2)
        signal_engine(endpoint, first, signal.SIGSTOP)
        traffic.wait_for_answers(8)
        signal_engine(endpoint, first, signal.SIGCONT)


def test_swapped_draft_and_changed_spec_fail_no_request(routed: Routed, endpoint: Endpoint) -> None:
    with routed.unnoticed("draft swap on each worker, and another draft in the spec"):
        before = set(endpoint.ready_pods())
        for pod in sorted(before):
            assert swap_draft(endpoint, pod, quantization="int8") == "int8"
        endpoint.patch({"speculation": {"draft": {"quantization": "int8"}}})
        wait_for("all pods are new", lambda: not before & endpoint.all_pods(), timeout_s=300, every_s=2)


def test_deleted_deployment_leaves_no_trace(endpoint: Endpoint) -> None:
    endpoint.delete()
