"""Changes of the user while a draft is trained or tried, on the real cluster: draft, target and replicas.

The user's value takes effect within a minute, and requests are answered as before. ``make drafts`` runs this.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.draft_files import GOOD_URI, TARGET_URI, bound_claim, write_noised_head
from harness.endpoint import Endpoint
from harness.kube import Namespace
from harness.release import Release
from harness.training_runs import begin, jobs, served_meanwhile, trained, wait_for_end, wait_for_run, wait_until_idle
from kube import Cluster, wait_for

from specdecode_worker.models.checkpoints.model_hash import model_hash
from specdecode_worker.models.checkpoints.model_store import resolve

NAME, CLAIM = "changed", "heads"
TWIN, OWN, TARGET = "twin", "of-the-user", "target"
SECONDS = 60
PHASES = pytest.mark.parametrize("phase", ["Serving", "Collecting", "Distilling", "Canary"])
pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not os.environ.get("DRAFT_PROOFS"), reason="ten minutes: DRAFT_PROOFS=1, or make drafts"),
]


@pytest.fixture(scope="module")
def claim(cluster: Cluster, watched: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of a claim with two heads and a target, whose hash differs from that of the embedded one."""
    if not cluster.local:
        pytest.skip("the volume lies on this machine")
    folder = tmp_path_factory.mktemp("changes") / CLAIM
    folder.mkdir()
    write_noised_head(folder / TWIN, 0.001)
    write_noised_head(folder / OWN, 0.002)
    shutil.copytree(resolve(TARGET_URI), folder / TARGET)
    config = folder / TARGET / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "copy"}))
    for entry in (folder / TARGET, *(folder / TARGET).iterdir()):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    with bound_claim(watched, CLAIM, folder):
        yield folder


@pytest.fixture(scope="module")
def served(release: Release, watched: Namespace, claim: Path) -> Iterator[Endpoint]:
    release.start()
    with trained(watched, NAME, CLAIM) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint) -> Iterator[Endpoint]:
    """Yield the deployment with nothing under way. What a test changes is taken back."""
    wait_until_idle(served)
    yield served
    served.patch(
        {
            "replicas": 1,
            "model": {"uri": TARGET_URI},
            "speculation": {"draft": {"uri": GOOD_URI}},
            "rollout": {"draft": {"candidate": None}},
        }
    )
    good = (model_hash(resolve(TARGET_URI)), model_hash(resolve(GOOD_URI)))
    wait_for("one worker of the beginning", lambda: models_of(served) == [good], timeout_s=180, every_s=1)


@PHASES
def test_draft_of_the_user_serves(endpoint: Endpoint, claim: Path, phase: str) -> None:
    with served_meanwhile(endpoint, replaced=True):
        run = enter(endpoint, claim, phase)
        changed = Change(f"{phase}: the user's draft serves")
        endpoint.patch({"speculation": {"draft": {"uri": f"pvc://{CLAIM}/{OWN}"}}})
        changed.wait(lambda: {draft for _, draft in models_of(endpoint)} == {model_hash(claim / OWN)})
        wait_for_superseded(endpoint, phase, run)


@PHASES
def test_target_of_the_user_serves(endpoint: Endpoint, claim: Path, phase: str) -> None:
    with served_meanwhile(endpoint, replaced=True):
        run = enter(endpoint, claim, phase)
        changed = Change(f"{phase}: the user's target serves")
        endpoint.patch({"model": {"uri": f"pvc://{CLAIM}/{TARGET}"}})
        changed.wait(lambda: {target for target, _ in models_of(endpoint)} == {model_hash(claim / TARGET)})
        wait_for_superseded(endpoint, phase, run)


@PHASES
def test_replicas_of_the_user_serve(endpoint: Endpoint, claim: Path, phase: str) -> None:
    """The run or the trial goes on."""
    with served_meanwhile(endpoint, replaced=True):
        run, before = enter(endpoint, claim, phase), endpoint.identities()
        changed = Change(f"{phase}: two workers serve")
        endpoint.patch({"replicas": 2})
        changed.wait(lambda: len(models_of(endpoint)) == 2)
        assert before < endpoint.identities()
        assert len(set(models_of(endpoint))) == 1 or phase == "Canary"
        status = endpoint.draft_status()
        assert run in (None, (status.get("run") or {}).get("id"), (status.get("lastRun") or {}).get("id")), status
        assert status.get("phase") == phase or phase == "Distilling", status
        if phase in ("Collecting", "Distilling", "Canary"):
            endpoint.command_draft("reject")


class Change:
    """Change of the user, which must take effect within SECONDS."""

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()

    def wait(self, happened: object) -> None:
        wait_for(self._what, happened, timeout_s=SECONDS, every_s=0.5)
        print(f"\n{self._what} after {time.monotonic() - self._began:.0f} s")


def enter(endpoint: Endpoint, claim: Path, phase: str) -> str | None:
    """Lead the deployment into a phase and return the run, if one is under way."""
    if phase == "Serving":
        return None
    if phase == "Collecting":
        endpoint.command_draft("distill")
        return wait_for_run(endpoint, phase)
    if phase == "Distilling":
        return begin(endpoint)
    candidate = {"uri": f"pvc://{CLAIM}/{TWIN}", "hash": model_hash(claim / TWIN)}
    endpoint.patch({"rollout": {"draft": {"candidate": candidate, "blockRequests": 2}}})
    wait_for("the trial runs", lambda: (endpoint.draft_status().get("trial") or {}).get("pairs"), timeout_s=180)
    assert endpoint.draft_status()["phase"] == phase
    return None


def models_of(endpoint: Endpoint) -> list[tuple[str, str]]:
    """Return the hashes of target and draft of every ready worker."""
    reports = [endpoint.report(pod) for pod in endpoint.ready_pods()]
    return [(report.target, report.draft.hash) for report in reports]


def wait_for_superseded(endpoint: Endpoint, phase: str, run: str | None) -> None:
    """Check how what was under way ended: superseded, with no Job left."""
    if run is not None:
        assert wait_for_end(endpoint, run)["outcome"] == "Superseded"
        wait_for("no Job is left", lambda: not jobs(endpoint), timeout_s=60)
    if phase == "Canary":
        assert endpoint.draft_status()["lineage"][0]["outcome"] == "Superseded", endpoint.draft_status()
    assert endpoint.draft_status().get("phase") in (None, "Serving")
