"""The whole loop on the real cluster: captured traffic, a training Job, a trial on one of two workers, and a promotion.

A run begins by command, with a head that has noise on its weights, or by drift, with a head that does not know tables
and traffic that turns from questions to tables. The heads lie on a claim that workers and the Job mount. Only requests
of one kind of client permit their capture: different prompts with short answers, so that a verdict has enough
conversations within minutes. ``make proofs P=drafts`` runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from localcluster.settings import NODE_ADDRESS

from specdecode_operator.times import seconds_of_timestamp
from specdecode_worker.models.fetch import model_hash
from support.e2e.draft_files import GOOD_URI, bound_claim, write_head_without_tables, write_noised_head
from support.e2e.endpoint import EQUAL_STEPS, ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed, with_knobs
from support.e2e.streams import served_meanwhile
from support.e2e.traffic import Traffic
from support.e2e.training_runs import askers, different_questions, different_tables, job_template
from support.e2e.worker_faults import wait_for_ready_pods
from support.kube import Cluster, Manifest, wait_for
from support.storage_servers.s3_server import s3_server

NAME, CLAIM, KEY_SECRET = "distilled", "new-drafts", "models-key"
WORKER = Path(sys.executable).parent / "specdecode-worker"
SPLITS = {"train": 200, "validation": 24, "test": 72}
"""Questions by split: a verdict needs 64 of the test split."""
CLIENTS, ASKERS = 2, 5
UNSEEN = {"train": 20, "validation": 2, "test": 10}
BASELINE_SECONDS, DRIFT_SECONDS = 1500, 1200
COLLECT_SECONDS, JOB_SECONDS, CANARY_SECONDS = 900, 1500, 900
pytestmark = [pytest.mark.timeout(4800), pytest.mark.proof("drafts")]


@pytest.fixture
def claim(local_cluster: Cluster, watched: Namespace, tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a claim that has both heads."""
    folder = tmp_path / CLAIM
    folder.mkdir()
    write_noised_head(folder / "noised")
    write_head_without_tables(folder / "no-tables")
    with bound_claim(watched, CLAIM, folder):
        yield folder


@pytest.fixture
def bucket(watched: Namespace, tmp_path: Path) -> Iterator[Manifest]:
    """Yield ``distillation.storage.s3`` for a server on the address of the cluster's node."""
    with s3_server(tmp_path, NODE_ADDRESS) as server:
        server.make_bucket("models")
        key = {name: value for name, value in server.environment.items() if name.startswith("AWS_") and "KEY" in name}
        watched.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEY_SECRET}, "stringData": key})
        yield {"uri": "s3://models", "endpoint": server.url, "secretRef": {"name": KEY_SECRET}}
        watched.kubectl("delete", "secret", KEY_SECRET)


def test_captured_traffic_becomes_a_faster_draft(watched: Namespace, claim: Path) -> None:
    with served(watched, claim / "noised", distillation()) as loop:
        loop.endpoint.command_draft("distill")
        loop.promote()
        assert loop.promoted.is_dir()
    print(loop.summary())


def test_draft_reaches_workers_through_a_bucket(watched: Namespace, claim: Path, bucket: Manifest) -> None:
    """The incumbent lies on the claim. A new pod comes up with the promoted draft, too."""
    settings = {**distillation(), "storage": bucket}
    with served(watched, claim / "noised", settings, replaced=True) as loop:
        loop.endpoint.command_draft("distill")
        loop.promote()
        current = loop.endpoint.draft_status()["current"]
        assert current["uri"] == f"{bucket['uri']}/drafts/{NAME}/{current['hash']}"
        old = loop.endpoint.ready_pods()[0]
        watched.kubectl("delete", "pod", old)
        wait_for_ready_pods(loop.endpoint, 2)
        assert old not in loop.endpoint.ready_pods()
        wait_for("it runs on both", lambda: loop.endpoint.running_drafts() == {current["hash"]}, timeout_s=60)
    print(loop.summary())


def test_traffic_that_turns_is_learnt(watched: Namespace, claim: Path) -> None:
    head = claim / "no-tables"
    trigger = {"mode": "Drift", "baseline": "5m", "minConversations": sum(SPLITS.values())}
    with served(watched, head, distillation(steps=120, trigger=trigger)) as loop:
        loop.wait_for_drift_state("the baseline is learnt", "Fresh", BASELINE_SECONDS)
        loop.asking.prompts = different_tables(SPLITS)
        turned = time.time()
        loop.wait_for_drift_state("drift is found", "DraftStale", DRIFT_SECONDS)
        loop.promote()
        oldest = oldest_record(loop.endpoint)
    print(loop.summary())
    assert oldest is None or oldest > turned, "captures of the questions are deleted"
    before, after, ceiling = (tokens_per_step(uri) for uri in (f"file://{head}", f"file://{loop.promoted}", GOOD_URI))
    recovered = (after - before) / (ceiling - before)
    print(
        f"tokens a step on tables: {before:.2f} before, {after:.2f} after, {ceiling:.2f} with the head that knows them"
    )
    assert recovered >= 0.5, f"{recovered:.0%} of the loss is recovered"


class Loop:
    """A deployment of two workers under load, and what happened to its draft."""

    def __init__(self, endpoint: Endpoint, claim: Path, asking: Traffic) -> None:
        self.endpoint, self.asking = endpoint, asking
        self._end: Manifest = {}
        self._claim, self._began, self._reached = claim, time.monotonic(), list[tuple[str, float]]()

    def wait(self, phase: str, *, timeout_s: float, also: tuple[str, ...] = ()) -> None:
        def reached() -> bool:
            assert self.endpoint.draft_status().get("phase") in (phase, *also), f"{self.endpoint.draft_status()}"
            return True

        wait_for(f"phase {phase} ({self.stages()})", reached, timeout_s=timeout_s, every_s=1)
        self._note(phase)

    def wait_for_drift_state(self, what: str, reason: str, timeout_s: float) -> None:
        def reached() -> bool:
            condition = self.endpoint.condition("DraftFresh")
            assert condition["reason"] == reason, f"{condition}"
            return True

        wait_for(what, reached, timeout_s=timeout_s, every_s=2)
        self._note(reason)

    def promote(self) -> None:
        """Go from the request to a new draft on all workers."""
        endpoint, old = self.endpoint, self.endpoint.running_drafts()
        self.wait("Collecting", timeout_s=60, also=("Distilling",))
        self.wait("Distilling", timeout_s=COLLECT_SECONDS)
        self.wait("Canary", timeout_s=JOB_SECONDS)
        self.wait("Promoting", timeout_s=CANARY_SECONDS, also=("Cooldown",))
        new = endpoint.draft_status()["current"]["hash"]
        wait_for("all workers run it", lambda: endpoint.running_drafts() == {new}, timeout_s=60)
        self.wait("Cooldown", timeout_s=60)
        self._end = status = endpoint.draft_status()
        assert status["lastRun"]["outcome"] == "Better", status
        self._trial = endpoint.ended_drafts()[0]  # the drafts go with the deployment
        assert self._trial["outcome"] == "Promoted", endpoint.drafts()
        assert {new} != old
        verdict = seconds_of_timestamp(status["lastRun"]["time"])
        wait_for("captures are deleted", lambda: is_newer(oldest_record(endpoint), verdict), timeout_s=60)

    @property
    def promoted(self) -> Path:
        """Folder of the promoted draft."""
        return self._claim / "drafts" / NAME / str(self._end["current"]["hash"])

    def _note(self, stage: str) -> None:
        self._reached.append((stage, time.monotonic() - self._began))

    def stages(self) -> str:
        """Return the time of each stage since the beginning."""
        return ", ".join(f"{stage} after {seconds:.0f} s" for stage, seconds in self._reached)

    def summary(self) -> str:
        """Return the time of each stage, the run and the trial."""
        return f"\n{self.stages()}\nrun: {self._end['lastRun']}\ndraft: {self._trial}"


@contextmanager
def served(namespace: Namespace, head: Path, settings: Manifest, *, replaced: bool = False) -> Iterator[Loop]:
    """Serve with a head of the claim while a block runs. All texts are equal, and no pod is replaced by the operator.

    ``replaced`` says that the block replaces one.
    """
    speculation = {"mode": "Static", "draft": {"uri": f"pvc://{CLAIM}/{head.name}"}}
    workers = {"template": with_knobs(EQUAL_STEPS), "resources": ONE_CORE}
    extra = {"distillation": settings, "draftRollout": {"blockRequests": 2}}
    with deployed(namespace, NAME, speculation, workers, replicas=2, **extra) as endpoint:
        wait_for_ready_pods(endpoint, 2)
        assert endpoint.running_drafts() == {model_hash(head)}
        with (
            served_meanwhile(endpoint, clients=CLIENTS, replaced=replaced) as url,
            askers(url, ASKERS, different_questions(SPLITS)) as asking,
        ):
            yield Loop(endpoint, head.parent, asking)
        print(f"{asking.answered} other answers")
        assert asking.failures == []


def distillation(steps: int = 40, trigger: Manifest | None = None) -> Manifest:
    """Return ``spec.distillation``: every request that permits it is captured, and a run takes a few minutes."""
    return {
        "capture": {"percent": 100, "consent": "OptIn", "maxAge": "2h"},
        "trigger": trigger or {"minConversations": sum(SPLITS.values())},
        "steps": steps,
        "timeLimit": "20m",
        "jobTemplate": job_template("6Gi"),
        "storage": {"uri": f"pvc://{CLAIM}"},
    }


def is_newer(oldest: float | None, time_seconds: float) -> bool:
    """Return whether nothing was captured before that time, which is rounded to seconds."""
    return oldest is None or oldest > time_seconds - 1


def oldest_record(endpoint: Endpoint) -> float | None:
    """Return the Unix time of the oldest captured conversation."""
    captures = [endpoint.report(pod).capture for pod in endpoint.ready_pods()]
    return min((one.oldest for one in captures if one is not None and one.oldest is not None), default=None)


def tokens_per_step(draft: str) -> float:
    """Return the tokens per step of a draft on requests for tables that no run has seen."""
    lines = [{"messages": [{"role": "user", "content": text}]} for text in different_tables(UNSEEN, seed="unseen")]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        prompts.write("".join(json.dumps(line) + "\n" for line in lines))
        prompts.flush()
        flags = ["--depth=3", "--max-tokens=24", "--temperature=0.8", "--threads=1", "--json"]
        command = [WORKER, "eval", f"--draft={draft}", f"--prompts={prompts.name}", *flags]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout)["runs"][0]["overall"]["tokens_per_step"])
