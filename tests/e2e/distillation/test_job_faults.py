"""Faults of a training Job on the real cluster, with requests served meanwhile.

Its pod is lost, it is suspended, finds no node, has too little memory or a full claim, or the operator is killed. The
status says what happened. The runs are too short for a verdict: each that is carried out ends with NotBetter. ``make
drafts`` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.askers import Askers
from harness.draft_files import GOOD_URI, bound_claim, write_noised_head
from harness.endpoint import MODEL, Endpoint
from harness.kube import Namespace
from harness.loop import deployed
from harness.questions import different_questions
from harness.release import Release
from harness.streams import StreamTraffic, failures, unbroken_answers
from kube import Cluster, Manifest, wait_for

from specdecode_operator.manifests import RUN_LABEL
from specdecode_worker.models.checkpoints.model_hash import model_hash
from specdecode_worker.models.checkpoints.model_store import resolve

NAME, CLAIM, SMALL_CLAIM = "faulty", "training", "small-training"
SPLITS = {"train": 12, "validation": 4, "test": 4}
CLAIM_BYTES = 20_000_000
"""Less than the weights of one draft."""
RUN_SECONDS = 300
NODE_LABEL = "accelerator"
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not os.environ.get("DRAFT_PROOFS"), reason="a quarter of an hour: DRAFT_PROOFS=1, or make drafts"
    ),
]


@pytest.fixture(scope="module")
def folders(
    cluster: Cluster, watched: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """Yield the folders of two claims by name. The second one is full after CLAIM_BYTES."""
    if not cluster.local:
        pytest.skip("the volumes lie on this machine")
    parent = tmp_path_factory.mktemp("claims")
    made = {name: parent / name for name in (CLAIM, SMALL_CLAIM)}
    for folder in made.values():
        folder.mkdir()
    small = str(made[SMALL_CLAIM])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={CLAIM_BYTES}", "tmpfs", small], check=True)
    with ExitStack() as claims:
        for name, folder in made.items():
            claims.enter_context(bound_claim(watched, name, folder))
        yield made
    subprocess.run(["umount", "--lazy", small], check=True)


@pytest.fixture(scope="module")
def served(release: Release, watched: Namespace, folders: dict[str, Path]) -> Iterator[Endpoint]:
    release.start()
    with deploy(watched, NAME, CLAIM) as endpoint:
        yield endpoint


@contextmanager
def deploy(namespace: Namespace, name: str, claim: str) -> Iterator[Endpoint]:
    """Deploy one worker whose runs take a claim and seconds."""
    distillation = {
        "capture": {"enabled": True, "share": 1, "consent": "OptIn", "maxAge": "2h"},
        "trigger": {"minConversations": sum(SPLITS.values()), "cooldown": "1s"},
        "job": {"steps": 4, "timeLimit": "10m", "resources": resources("6Gi")},
        "storage": {"claim": claim},
    }
    speculation = {"mode": "Static", "draft": {"uri": GOOD_URI}}
    with deployed(namespace, name, speculation, {}, replicas=1, distillation=distillation) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint) -> Iterator[Endpoint]:
    """Yield the deployment without a run. What a test changes in the Job's section is taken back."""
    wait_for("no run is under way", lambda: served.draft_status().get("phase") in (None, "Serving"), timeout_s=60)
    yield served
    served.patch({"distillation": {"job": {"nodeSelector": {NODE_LABEL: None}, "resources": resources("6Gi")}}})


def test_deleted_pod_is_replaced_and_the_run_goes_on(endpoint: Endpoint, folders: dict[str, Path]) -> None:
    with served_meanwhile(endpoint):
        run = begin(endpoint)
        uid = job(endpoint)["metadata"]["uid"]
        wait_for_work(folders, run)
        kill_pods(endpoint)
        wait_for("another pod", lambda: len(names_of_pods(endpoint)) == 1, timeout_s=60)
        assert job(endpoint)["metadata"]["uid"] == uid, "the same Job goes on"
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended
    assert ended["conversations"] > 0, ended


def test_suspended_job_goes_on_later(endpoint: Endpoint, folders: dict[str, Path]) -> None:
    with served_meanwhile(endpoint):
        run = begin(endpoint)
        wait_for_work(folders, run)
        set_suspended(endpoint, True)
        wait_for_state(endpoint, "Suspended")
        wait_for("its pod is gone", lambda: not names_of_pods(endpoint), timeout_s=150)
        set_suspended(endpoint, False)
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended
    assert ended["conversations"] > 0, ended


def test_job_without_a_node_waits_with_the_words_of_the_scheduler(endpoint: Endpoint) -> None:
    endpoint.patch({"distillation": {"job": {"nodeSelector": {NODE_LABEL: "none-such"}}}})
    with served_meanwhile(endpoint):
        run = begin(endpoint, state="Unschedulable")
        assert "node affinity/selector" in endpoint.draft_status()["run"]["jobReason"]
        endpoint.command_draft("reject")
        ended = wait_for_end(endpoint, run)
        wait_for("no Job is left", lambda: not jobs(endpoint), timeout_s=60)
    assert ended["outcome"] == "Rejected", ended


def test_job_without_memory_fails_with_the_words_of_the_kernel(endpoint: Endpoint) -> None:
    endpoint.patch({"distillation": {"job": {"resources": resources("600Mi")}}})
    with served_meanwhile(endpoint):
        ended = wait_for_end(endpoint, begin(endpoint, state=None))
    assert ended["outcome"] == "Failed", ended
    assert "OOMKilled" in ended["reason"], ended


def test_killed_operators_create_one_job(endpoint: Endpoint, release: Release) -> None:
    """All replicas of the operator are killed while the run collects, when its Job is created, and while it runs."""
    with served_meanwhile(endpoint) as url:
        endpoint.command_draft("distill")
        # A run that failed has left captures, which may be enough at once.
        run = wait_for_phase(endpoint, "Collecting", "Distilling")
        kill_operators(release)
        with Askers(url, 2, different_questions(SPLITS)):
            wait_for("the Job is created", lambda: jobs(endpoint), timeout_s=120, every_s=0.1)
        uids = [one["metadata"]["uid"] for one in jobs(endpoint)]
        kill_operators(release)
        wait_for_state(endpoint, "Running")
        kill_operators(release)
        assert [one["metadata"]["uid"] for one in jobs(endpoint)] == uids, "one Job, and the same one"
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended


@pytest.mark.parametrize("phase", ["Collecting", "Distilling"])
def test_draft_of_the_user_ends_a_run(endpoint: Endpoint, folders: dict[str, Path], phase: str) -> None:
    """Another draft in the spec replaces the workers, which then run it, and no Job is left."""
    head = folders[CLAIM] / "of-the-user"
    if not head.exists():
        write_noised_head(head, 0.001)
    if phase == "Collecting":
        endpoint.command_draft("distill")
        run = wait_for_phase(endpoint, "Collecting")
    else:
        run = begin(endpoint)
    try:
        began = time.monotonic()
        endpoint.patch({"speculation": {"draft": {"uri": f"pvc://{CLAIM}/{head.name}"}}})
        ended = wait_for_end(endpoint, run)
        wait_for("no Job is left", lambda: not jobs(endpoint), timeout_s=60)
        digest = model_hash(head)
        wait_for("the worker runs it", lambda: endpoint.running_drafts() == {digest}, timeout_s=180, every_s=1)
        print(f"\n{phase}: the user's draft runs after {time.monotonic() - began:.0f} s")
        assert ended["outcome"] == "Superseded", ended
        assert endpoint.draft_status().get("phase") == "Serving"
    finally:
        endpoint.patch({"speculation": {"draft": {"uri": GOOD_URI}}})
        good = model_hash(resolve(GOOD_URI))
        wait_for("the worker is back", lambda: endpoint.running_drafts() == {good}, timeout_s=180, every_s=1)


def test_full_claim_fails_the_run_with_the_reason(
    release: Release, watched: Namespace, folders: dict[str, Path]
) -> None:
    with deploy(watched, "full", SMALL_CLAIM) as endpoint, served_meanwhile(endpoint):
        ended = wait_for_end(endpoint, begin(endpoint, state=None))
    assert ended["outcome"] == "Failed", ended
    assert "No space left on device" in ended["reason"], ended


@contextmanager
def served_meanwhile(endpoint: Endpoint) -> Iterator[str]:
    """Check that requests are answered as before while a block runs. Yield the URL."""
    with endpoint.namespace.reach("service", endpoint.name, 80) as url:
        expected, before = unbroken_answers(url, MODEL), endpoint.identities()
        with StreamTraffic(url, MODEL, 1) as traffic:
            yield url
        assert failures(traffic.answers, expected) == []
        assert endpoint.identities() == before, "no worker was replaced"


def begin(endpoint: Endpoint, state: str | None = "Running") -> str:
    """Begin a run and return its name once its Job has the state."""
    endpoint.command_draft("distill")
    run = wait_for_phase(endpoint, "Collecting", "Distilling")
    with endpoint.namespace.reach("service", endpoint.name, 80) as url, Askers(url, 2, different_questions(SPLITS)):
        wait_for("the Job is created", lambda: jobs(endpoint), timeout_s=120)
    if state is not None:
        wait_for_state(endpoint, state)
    return run


def wait_for_phase(endpoint: Endpoint, *phases: str) -> str:
    """Wait until the phase is one of these and return the name of the run."""
    wait_for(f"phase {phases}", lambda: endpoint.draft_status().get("phase") in phases, timeout_s=60)
    return str(endpoint.draft_status()["run"]["id"])


def wait_for_work(folders: dict[str, Path], run: str) -> None:
    """Wait until the run replays captured requests."""
    data = folders[CLAIM] / "distillation" / NAME / run / "data"
    wait_for("captures are replayed", data.is_dir, timeout_s=RUN_SECONDS, every_s=0.2)


def wait_for_state(endpoint: Endpoint, state: str) -> None:
    def reached() -> bool:
        run = endpoint.draft_status().get("run") or {}
        assert run.get("jobState") == state, f"{run}"
        return True

    wait_for(f"the Job is {state}", reached, timeout_s=90)


def wait_for_end(endpoint: Endpoint, run: str) -> Manifest:
    """Wait until the run has ended and return its end."""

    def ended() -> Manifest | None:
        last = endpoint.draft_status().get("lastRun") or {}
        assert last.get("id") == run, f"{endpoint.draft_status()}"
        return last

    return wait_for(f"run {run} has ended", ended, timeout_s=RUN_SECONDS, every_s=1)


def jobs(endpoint: Endpoint) -> list[Manifest]:
    """Return the Jobs that train. Others delete the folder of a run."""
    listed = endpoint.namespace.list("jobs", endpoint.labels)
    return [one for one in listed if not one["metadata"]["labels"][RUN_LABEL].endswith("-delete")]


def job(endpoint: Endpoint) -> Manifest:
    (only,) = jobs(endpoint)
    return only


def names_of_pods(endpoint: Endpoint) -> list[str]:
    """Return the pods of Jobs that have not ended."""
    pods = endpoint.namespace.list("pods", f"{endpoint.labels},specdecode.io/role=job")
    return [pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]


def kill_pods(endpoint: Endpoint) -> None:
    for name in names_of_pods(endpoint):
        endpoint.namespace.kubectl("delete", "pod", name, "--grace-period=0", "--force")


def kill_operators(release: Release) -> None:
    """Kill all replicas of the operator; the Deployment starts others."""
    names = release.namespace.kubectl("get", "pods", "--output", "name").split()
    release.namespace.kubectl("delete", *names, "--grace-period=0", "--force")


def set_suspended(endpoint: Endpoint, suspend: bool) -> None:
    """Suspend or resume the Job as a queue does."""
    name = job(endpoint)["metadata"]["name"]
    patch = json.dumps({"spec": {"suspend": suspend}})
    endpoint.namespace.kubectl("patch", "job", name, "--type", "merge", "--patch", patch)


def resources(memory: str) -> Manifest:
    """Return resources of the Job with a limit of memory."""
    return {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": memory}}
