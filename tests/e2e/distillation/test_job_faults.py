"""Faults of a training Job on the real cluster, with requests served meanwhile.

Its pod or its node is lost, it is suspended, finds no node, has too little memory or a full claim, or the operator is
killed. The status says what happened. The runs are too short for a verdict: each that is carried out ends with
NotBetter. ``make proofs P=drafts`` runs them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.cluster_faults.extra_node import extra_node, node_command, prefer
from support.e2e.draft_files import bound_claim
from support.e2e.endpoint import Endpoint
from support.e2e.kube import Namespace
from support.e2e.release import Release
from support.e2e.streams import served_meanwhile
from support.e2e.training_runs import (
    RUN_SECONDS,
    SPLITS,
    askers,
    begin,
    different_questions,
    job,
    job_template,
    jobs,
    pods_of_jobs,
    trained,
    wait_for_end,
    wait_for_run,
    wait_for_state,
    wait_until_idle,
)
from support.kube import Cluster, Manifest, wait_for

NAME, CLAIM, SMALL_CLAIM = "faulty", "training", "small-training"
CLAIM_BYTES = 20_000_000
"""Less than the weights of one draft."""
NODE_LABEL = "accelerator"
pytestmark = [pytest.mark.timeout(1800), pytest.mark.proof("drafts")]


@pytest.fixture(scope="module")
def folders(
    local_cluster: Cluster, watched: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """Yield the folders of two claims by name. The second one is full after CLAIM_BYTES."""
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
def served(watched: Namespace, folders: dict[str, Path]) -> Iterator[Endpoint]:
    with trained(watched, NAME, CLAIM) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint) -> Iterator[Endpoint]:
    """Yield the deployment without a run. What a test changes in the Job's section is taken back."""
    wait_until_idle(served)
    yield served
    place(served, job_template("6Gi"))


def test_deleted_pod_is_replaced_and_the_run_goes_on(endpoint: Endpoint, folders: dict[str, Path]) -> None:
    with served_meanwhile(endpoint):
        run = begin(endpoint)
        uid = job(endpoint)["metadata"]["uid"]
        wait_for_work(folders, run)
        kill_pods(endpoint)
        wait_for("another pod", lambda: len(pods_of_jobs(endpoint)) == 1, timeout_s=60)
        assert job(endpoint)["metadata"]["uid"] == uid, "the same Job goes on"
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended
    assert ended["conversations"] > 0, ended


def test_run_on_a_lost_node_goes_on_elsewhere(endpoint: Endpoint, folders: dict[str, Path], cluster: Cluster) -> None:
    """The node loses its power for good, and its administrator says so; the Job goes on from the claim."""
    with extra_node([cluster.worker_image], timeout_s=1500) as node, served_meanwhile(endpoint):
        place(endpoint, job_template("6Gi", **placed_on(node)))
        run = begin(endpoint)
        wait_for_work(folders, run)
        (pod,) = pods_of_jobs(endpoint)
        assert pod["spec"]["nodeName"] == node
        node_command("kill", node)
        status = wait_for_state(endpoint, "Preempted", timeout_s=180)
        assert "taint" in status["jobReason"].lower(), status
        cluster.kubectl("taint", "node", node, "node.kubernetes.io/out-of-service=lost:NoExecute")
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended
    assert ended["conversations"] > 0, ended


def test_suspended_job_goes_on_later(endpoint: Endpoint, folders: dict[str, Path]) -> None:
    with served_meanwhile(endpoint):
        run = begin(endpoint)
        wait_for_work(folders, run)
        set_suspended(endpoint, True)
        wait_for_state(endpoint, "Suspended")
        wait_for("its pod is gone", lambda: not pods_of_jobs(endpoint), timeout_s=150)
        set_suspended(endpoint, False)
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended
    assert ended["conversations"] > 0, ended


def test_job_without_a_node_waits_with_the_words_of_the_scheduler(endpoint: Endpoint) -> None:
    place(endpoint, job_template("6Gi", nodeSelector={NODE_LABEL: "none-such"}))
    with served_meanwhile(endpoint):
        run = begin(endpoint, state="Unschedulable")
        assert "node affinity/selector" in endpoint.draft_status()["run"]["jobReason"]
        endpoint.command_draft("reject")
        ended = wait_for_end(endpoint, run)
        wait_for("no Job is left", lambda: not jobs(endpoint), timeout_s=60)
    assert ended["outcome"] == "Rejected", ended


def test_job_without_memory_fails_with_the_words_of_the_kernel(endpoint: Endpoint) -> None:
    place(endpoint, job_template("600Mi"))
    with served_meanwhile(endpoint):
        ended = wait_for_end(endpoint, begin(endpoint, state=None))
    assert ended["outcome"] == "Failed", ended
    assert "OOMKilled" in ended["reason"], ended


def test_killed_operators_create_one_job(endpoint: Endpoint, release: Release) -> None:
    """All replicas of the operator are killed while the run collects, when its Job is created, and while it runs."""
    with served_meanwhile(endpoint) as url:
        endpoint.command_draft("distill")
        # A run that failed has left captures, which may be enough at once.
        run = wait_for_run(endpoint, "Collecting", "Distilling")
        release.kill()
        with askers(url, 2, different_questions(SPLITS)):
            wait_for("the Job is created", lambda: jobs(endpoint), timeout_s=120, every_s=0.1)
        uids = [one["metadata"]["uid"] for one in jobs(endpoint)]
        release.kill()
        wait_for_state(endpoint, "Running")
        release.kill()
        assert [one["metadata"]["uid"] for one in jobs(endpoint)] == uids, "one Job, and the same one"
        ended = wait_for_end(endpoint, run)
    assert ended["outcome"] == "NotBetter", ended


def test_full_claim_fails_the_run_with_the_reason(watched: Namespace, folders: dict[str, Path]) -> None:
    with trained(watched, "full", SMALL_CLAIM) as endpoint, served_meanwhile(endpoint):
        ended = wait_for_end(endpoint, begin(endpoint, state=None))
    assert ended["outcome"] == "Failed", ended
    assert "No space left on device" in ended["reason"], ended


def placed_on(node: str) -> Manifest:
    """Return fields of a Job's pod, which runs on the node while it is there, and is given up soon after its loss."""
    lost = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    fields = prefer(node)
    tolerations = [*fields["tolerations"], {**lost, "tolerationSeconds": 5}]
    return {"tolerations": tolerations, "affinity": fields["affinity"]}


def place(endpoint: Endpoint, template: Manifest) -> None:
    operations = [{"op": "replace", "path": "/spec/distillation/jobTemplate", "value": template}]
    endpoint.namespace.kubectl("patch", "sdd", endpoint.name, "--type", "json", "--patch", json.dumps(operations))


def wait_for_work(folders: dict[str, Path], run: str) -> None:
    """Wait until the run replays captured requests."""
    data = folders[CLAIM] / "distillation" / NAME / run / "data"
    wait_for("captures are replayed", data.is_dir, timeout_s=RUN_SECONDS, every_s=0.2)


def kill_pods(endpoint: Endpoint) -> None:
    for pod in pods_of_jobs(endpoint):
        endpoint.namespace.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")


def set_suspended(endpoint: Endpoint, suspend: bool) -> None:
    """Suspend or resume the Job as a queue does."""
    name = job(endpoint)["metadata"]["name"]
    patch = json.dumps({"spec": {"suspend": suspend}})
    endpoint.namespace.kubectl("patch", "job", name, "--type", "merge", "--patch", patch)
