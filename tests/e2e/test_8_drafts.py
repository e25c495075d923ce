"""A candidate draft on the real cluster: tried on one of two workers, promoted, and kept by new pods; or rolled back.

The incumbent is a copy of the embedded head with noise on its weights; its files are on the node. Steps are padded to
one duration, so that the gain is that of tokens per step, on every processor. ``make test-all`` runs the promotion, and
``make proofs P=drafts`` the rest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from specdecode_worker.contract import StepTime, SyntheticKnobs
from specdecode_worker.models.fetch import model_hash, resolve
from support.client_threads import ClientThreads
from support.e2e.draft_files import GOOD_URI, write_noised_head
from support.e2e.endpoint import EQUAL_STEPS, MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed, with_knobs
from support.e2e.release import Release
from support.e2e.streams import StreamTraffic, failures, served_meanwhile, unbroken_answers
from support.e2e.worker_faults import kill_pod, wait_for_ready_pods
from support.kube import Cluster, Manifest, wait_for
from support.processor import MULTIPLIES_BF16
from support.tiers import skip_reason

NAME = "drafts"
NOISED_URI = "file:///drafts/noised"
VERDICT_SECONDS = 600
CLIENTS = 6
TASK = "code"
pytestmark = pytest.mark.timeout(1500)
PROOF = pytest.mark.proof("drafts")


@pytest.fixture(scope="module")
def drafts(local_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder on the node with the noised head."""
    folder = tmp_path_factory.mktemp("drafts")
    write_noised_head(folder / "noised")
    write_noised_head(folder / "twin", 0.001)
    return folder


@contextmanager
def two_workers(
    namespace: Namespace,
    folder: Path,
    draft: str,
    knobs: SyntheticKnobs = EQUAL_STEPS,
    tasks: Sequence[Manifest] = (),
) -> Iterator[Endpoint]:
    """Deploy two workers that draft chains of three tokens with ``draft``."""
    template = with_knobs(knobs)
    template["spec"]["volumes"] = [{"name": "drafts", "hostPath": {"path": str(folder), "type": "Directory"}}]
    mounts = [{"name": "drafts", "mountPath": "/drafts", "readOnly": True}]
    template["spec"]["containers"][0]["volumeMounts"] = mounts
    template["spec"]["initContainers"] = [{"name": "pull", "volumeMounts": mounts}]
    speculation = {"mode": "Static", "draft": {"uri": draft}, "tasks": list(tasks)}
    with deployed(namespace, NAME, speculation, {"template": template}, replicas=2) as endpoint:
        wait_for_ready_pods(endpoint, 2)
        yield endpoint


def offer(endpoint: Endpoint, uri: str, digest: str) -> None:
    """Offer a candidate, with blocks that are short enough for a test."""
    endpoint.patch({"draftRollout": {"blockRequests": 1}})
    endpoint.offer_draft(uri, digest)


@pytest.mark.skipif(not MULTIPLIES_BF16, reason=skip_reason("bf16", "steps are too uneven for a verdict in time"))
def test_better_candidate_is_promoted_without_a_new_pod(release: Release, watched: Namespace, drafts: Path) -> None:
    good = model_hash(resolve(GOOD_URI))
    with two_workers(watched, drafts, NOISED_URI) as endpoint, watched.reach("service", NAME, 80) as url:
        expected, before = unbroken_answers(url, MODEL), endpoint.identities()
        assert endpoint.running_drafts() == {model_hash(drafts / "noised")}
        with StreamTraffic(url, MODEL, CLIENTS) as traffic:
            offer(endpoint, GOOD_URI, good)
            wait_for("a pod tries it", endpoint.trial_pod, timeout_s=60)
            wait_for("all workers run it", lambda: _is_promoted(endpoint, good), timeout_s=VERDICT_SECONDS, every_s=2)
            assert endpoint.identities() == before, "no pod was replaced"
            kill_pod(endpoint, sorted(endpoint.ready_pods())[0])
            wait_for_ready_pods(endpoint, 2)
            wait_for("the new pod runs it, too", lambda: endpoint.running_drafts() == {good}, timeout_s=60)
        before = endpoint.identities()
        with release.stopped():
            pass
        endpoint.patch({"replicas": 3})
        wait_for_ready_pods(endpoint, 3)
        assert before < endpoint.identities(), "another operator replaces no pod"
        wait_for("a third pod runs it, too", lambda: endpoint.running_drafts() == {good}, timeout_s=60)
        (ended,) = endpoint.ended_drafts()
        print(f"\npromoted after {ended['pairs']} pairs: {ended['reason']}")
        assert ended["outcome"] == "Promoted"
        differing = [problem for problem in failures(traffic.answers, expected) if problem.startswith("text differs")]
        assert differing == []


def _is_promoted(endpoint: Endpoint, digest: str) -> bool:
    current = endpoint.draft_status().get("current") or {}
    return current.get("hash") == digest and endpoint.running_drafts() == {digest}


@PROOF
def test_worse_candidate_is_rolled_back(watched: Namespace, drafts: Path) -> None:
    with two_workers(watched, drafts, GOOD_URI) as endpoint, served_meanwhile(endpoint, clients=CLIENTS):
        offer(endpoint, NOISED_URI, model_hash(drafts / "noised"))
        assert wait_for_end(endpoint, model_hash(resolve(GOOD_URI)))["outcome"] == "RolledBack"


@PROOF
def test_killed_operators_change_no_outcome(release: Release, watched: Namespace, drafts: Path) -> None:
    """All replicas of the operator are killed again and again while a draft is tried, promoted and taken back."""
    good, noised = model_hash(resolve(GOOD_URI)), model_hash(drafts / "noised")
    with two_workers(watched, drafts, NOISED_URI) as endpoint:
        with served_meanwhile(endpoint, clients=CLIENTS), OperatorKiller(release) as killer:
            offer(endpoint, GOOD_URI, good)
            wait_for("all workers run it", lambda: _is_promoted(endpoint, good), timeout_s=VERDICT_SECONDS, every_s=2)
            assert [ended["outcome"] for ended in endpoint.ended_drafts()] == ["Promoted"]
            endpoint.command_draft("rollback")
            wait_for("all workers are back", lambda: _is_promoted(endpoint, noised), timeout_s=180, every_s=2)
        outcomes = [ended["outcome"] for ended in endpoint.ended_drafts()]
        print(f"\n{outcomes}; the operator was killed {killer.kills} times")
        assert outcomes == ["RolledBack"]
        assert killer.kills >= 3


@PROOF
def test_promoted_draft_serves_again_after_a_restore(watched: Namespace, drafts: Path) -> None:
    """Both kinds are deleted with all children and state, and applied again from one `kubectl get -o yaml`."""
    good = model_hash(resolve(GOOD_URI))
    with two_workers(watched, drafts, NOISED_URI) as endpoint, watched.reach("service", NAME, 80) as url:
        with StreamTraffic(url, MODEL, CLIENTS):
            offer(endpoint, GOOD_URI, good)
            wait_for("all workers run it", lambda: _is_promoted(endpoint, good), timeout_s=VERDICT_SECONDS, every_s=2)
        wait_for("the rollout is over", lambda: endpoint.draft_status().get("phase") == "Cooldown", timeout_s=60)
        backup = watched.kubectl("get", "sdd,sddr", "--output", "yaml")
        watched.kubectl("delete", "sdd,sddr", "--all", "--timeout=60s")
        wait_for("no child is left", lambda: not endpoint.all_pods() and not _has_state(endpoint), timeout_s=120)
        watched.kubectl("apply", "--filename", "-", stdin=backup)
        wait_for_ready_pods(endpoint, 2)
        wait_for("all workers run the draft again", lambda: _is_promoted(endpoint, good), timeout_s=180, every_s=2)
        assert endpoint.drafts()[0]["status"]["phase"] in ("Promoting", "Serving")
        wait_for("a plan is pushed again", lambda: (endpoint.speculation().get("planVersion") or 0) >= 1, timeout_s=60)


def _has_state(endpoint: Endpoint) -> bool:
    names = {one["metadata"]["name"] for one in endpoint.namespace.list("configmaps")}
    return f"{NAME}-state" in names


class OperatorKiller(ClientThreads):
    """Thread that kills all replicas of the operator, at random moments."""

    def __init__(self, release: Release) -> None:
        super().__init__(1, join_seconds=60)
        self.kills = 0
        self._release, self._moments = release, random.Random(8)

    def _ask(self, number: int) -> str:
        if not self._stop.wait(self._moments.uniform(15, 45)):
            self._release.kill()
            self.kills += 1
        return ""


@PROOF
def test_candidate_with_more_tokens_per_step_and_slower_steps_is_rolled_back(watched: Namespace, drafts: Path) -> None:
    good = model_hash(resolve(GOOD_URI))
    knobs = EQUAL_STEPS.model_copy(update={"by_draft": {good: SyntheticKnobs(step_time=(StepTime(seconds=0.3),))}})
    with two_workers(watched, drafts, NOISED_URI, knobs) as endpoint, served_meanwhile(endpoint, clients=CLIENTS):
        offer(endpoint, GOOD_URI, good)
        assert wait_for_end(endpoint, model_hash(drafts / "noised"))["outcome"] == "RolledBack"


@PROOF
def test_candidate_that_loses_one_task_is_not_promoted(watched: Namespace, drafts: Path) -> None:
    """The candidate is faster on three quarters of the traffic and on average. For one task it drafts nothing right."""
    good, twin = model_hash(resolve(GOOD_URI)), model_hash(drafts / "twin")
    steps = EQUAL_STEPS.step_time
    by_draft = {
        good: SyntheticKnobs(step_time=steps, acceptance=(0.1,), task_acceptance={TASK: (1.0,)}),
        twin: SyntheticKnobs(step_time=steps, task_acceptance={TASK: (0.0,)}),
    }
    knobs = EQUAL_STEPS.model_copy(update={"by_draft": by_draft})
    with (
        two_workers(watched, drafts, GOOD_URI, knobs, [{"name": TASK}]) as endpoint,
        served_meanwhile(endpoint, clients=2, headers={"X-Specdecode-Task": TASK}),
        served_meanwhile(endpoint, clients=6),
    ):
        offer(endpoint, "file:///drafts/twin", twin)
        assert wait_for_end(endpoint, good)["outcome"] in ("RolledBack", "Undecided")


def wait_for_end(endpoint: Endpoint, old: str) -> Manifest:
    """Wait until the only trial has ended and all workers run the old draft; return the status of the candidate."""
    wait_for("a verdict", endpoint.ended_drafts, timeout_s=VERDICT_SECONDS, every_s=2)
    wait_for("all workers run the old draft", lambda: endpoint.running_drafts() == {old}, timeout_s=10)
    (ended,) = endpoint.ended_drafts()
    print(f"\n{ended['outcome']} after {ended['pairs']} pairs: {ended['reason']}")
    return dict(ended)
