"""A whole loop on the real cluster: captured traffic, a training Job, a trial on one of two workers, and a promotion.

The incumbent is the embedded head with noise on its weights, on a claim that workers and the Job mount. Only requests
of one kind of client permit their capture: different questions with short answers, so that a verdict has enough
conversations within minutes. ``make drafts`` runs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.askers import Askers
from harness.draft_files import bind_claim, delete_claim, write_noised_head
from harness.endpoint import EQUAL_STEPS, MODEL, Endpoint
from harness.kube import Namespace
from harness.loop import deployed, with_knobs
from harness.release import Release
from harness.streams import StreamTraffic, failures, unbroken_answers
from harness.worker_faults import wait_for_ready_pods
from kube import Cluster, Manifest, wait_for

from specdecode_worker.models.checkpoints.model_hash import model_hash

NAME, CLAIM = "distilled", "new-drafts"
INCUMBENT = f"pvc://{CLAIM}/noised"
SPLITS = {"train": 200, "validation": 24, "test": 72}
"""Questions by split: a verdict needs 64 of the test split."""
CLIENTS, ASKERS = 2, 4
COLLECT_SECONDS, JOB_SECONDS, CANARY_SECONDS = 900, 1500, 900
pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not os.environ.get("DRAFT_PROOFS"), reason="half an hour: DRAFT_PROOFS=1, or make drafts"),
]


@pytest.fixture
def claim(cluster: Cluster, watched: Namespace, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a claim that has the noised head."""
    if not cluster.local:
        pytest.skip("the volume lies on this machine")
    folder = tmp_path / CLAIM
    folder.mkdir()
    write_noised_head(folder / "noised")
    for parent in (tmp_path, tmp_path.parent):
        parent.chmod(0o755)
    volume = bind_claim(watched, CLAIM, folder)
    yield folder
    delete_claim(cluster, watched, CLAIM, volume)


def test_captured_traffic_becomes_a_faster_draft(release: Release, watched: Namespace, claim: Path) -> None:
    release.start()
    speculation = {"mode": "Static", "draft": {"uri": INCUMBENT}}
    workers = {"template": with_knobs(EQUAL_STEPS)}
    extra = {"distillation": distillation(), "rollout": {"draft": {"blockRequests": 2}}}
    with (
        deployed(watched, NAME, speculation, workers, replicas=2, **extra) as endpoint,
        watched.reach("service", NAME, 80) as url,
    ):
        wait_for_ready_pods(endpoint, 2)
        expected, before = unbroken_answers(url, MODEL), endpoint.identities()
        old = model_hash(claim / "noised")
        assert running_hashes(endpoint) == {old}
        stages = Stages()
        with StreamTraffic(url, MODEL, CLIENTS) as traffic, Askers(url, ASKERS, SPLITS) as askers:
            endpoint.command_draft("distill")
            stages.wait("Collecting", endpoint, timeout_s=60)
            stages.wait("Distilling", endpoint, timeout_s=COLLECT_SECONDS)
            stages.wait("Canary", endpoint, timeout_s=JOB_SECONDS)
            stages.wait("Promoting", endpoint, timeout_s=CANARY_SECONDS, also=("Cooldown",))
            new = endpoint.draft_status()["current"]["hash"]
            wait_for("all workers run it", lambda: running_hashes(endpoint) == {new}, timeout_s=60)
            stages.wait("Cooldown", endpoint, timeout_s=60)
        status = endpoint.draft_status()
        print(f"\n{stages}\nrun: {status['lastRun']}\nlineage: {status['lineage'][0]}")
        assert new != old
        assert status["lastRun"]["outcome"] == "Better"
        assert status["lineage"][0]["outcome"] == "Promoted"
        assert endpoint.identities() == before, "no pod was replaced"
        assert askers.problems == []
        assert failures(traffic.answers, expected) == []
        assert new in {folder.name for folder in (claim / "drafts" / NAME).iterdir()}
        wait_for("captures are deleted", lambda: captured(endpoint) < SPLITS["train"], timeout_s=60)


def distillation() -> Manifest:
    """Return ``spec.distillation``: every request that permits it is captured, and a run takes a few minutes."""
    return {
        "capture": {"enabled": True, "share": 1, "consent": "OptIn", "maxAge": "2h"},
        "trigger": {"minConversations": sum(SPLITS.values())},
        "job": {
            "steps": 40,
            "timeLimit": "20m",
            "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "6Gi"}},
        },
        "storage": {"claim": CLAIM},
    }


class Stages:
    """Phases of the rollout with the seconds until each was reached."""

    def __init__(self) -> None:
        self._began, self._reached = time.monotonic(), list[tuple[str, float]]()

    def wait(self, phase: str, endpoint: Endpoint, *, timeout_s: float, also: tuple[str, ...] = ()) -> None:
        wait_for(
            f"phase {phase} ({self})",
            lambda: endpoint.draft_status().get("phase") in (phase, *also),
            timeout_s=timeout_s,
            every_s=1,
        )
        self._reached.append((phase, time.monotonic() - self._began))

    def __str__(self) -> str:
        return ", ".join(f"{phase} after {seconds:.0f} s" for phase, seconds in self._reached)


def running_hashes(endpoint: Endpoint) -> set[str]:
    """Return the hashes of the drafts that the ready workers run."""
    return {endpoint.report(pod).draft.hash for pod in endpoint.ready_pods()}


def captured(endpoint: Endpoint) -> int:
    """Return the captured conversations of all ready workers."""
    captures = [endpoint.report(pod).capture for pod in endpoint.ready_pods()]
    return sum(one.conversations for one in captures if one is not None)
