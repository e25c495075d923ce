"""Changes of the user while a draft is trained or tried, on the real cluster: draft, target and replicas.

The user's value takes effect within a minute, and requests are answered as before. ``make proofs P=drafts`` runs this.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdecode_worker.models.fetch import model_hash, resolve
from support.e2e.draft_files import GOOD_URI, TARGET_URI, bound_claim, write_noised_head
from support.e2e.endpoint import EQUAL_STEPS, ONE_CORE, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import with_knobs
from support.e2e.streams import served_meanwhile
from support.e2e.training_runs import begin, jobs, trained, wait_for_end, wait_for_run, wait_until_idle
from support.kube import Cluster, Manifest, wait_for

NAME, CLAIM = "changed", "heads"
NOISED, OWN, TARGET = "noised", "of-the-user", "target"
NOISED_URI = f"pvc://{CLAIM}/{NOISED}"
CLIENTS, SECONDS, VERDICT_SECONDS = 3, 60, 600
RUNS = ("Collecting", "Distilling")
PHASES = pytest.mark.parametrize("phase", ["Serving", *RUNS, "Canary", "Promoting", "RollingBack", "Cooldown"])
pytestmark = [pytest.mark.timeout(1200), pytest.mark.proof("drafts")]


@pytest.fixture(scope="module")
def claim(local_cluster: Cluster, watched: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder of a claim with two heads and a target, whose hash differs from that of the embedded one."""
    folder = tmp_path_factory.mktemp("changes") / CLAIM
    folder.mkdir()
    write_noised_head(folder / NOISED)
    write_noised_head(folder / OWN, 0.002)
    shutil.copytree(resolve(TARGET_URI), folder / TARGET)
    config = folder / TARGET / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "copy"}))
    for entry in (folder / TARGET, *(folder / TARGET).iterdir()):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    with bound_claim(watched, CLAIM, folder):
        yield folder


@pytest.fixture(scope="module")
def served(watched: Namespace, claim: Path) -> Iterator[Endpoint]:
    workers = {"template": with_knobs(EQUAL_STEPS), "resources": ONE_CORE}
    with trained(watched, NAME, CLAIM, NOISED_URI, workers) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(served: Endpoint, claim: Path) -> Iterator[Endpoint]:
    """Yield the deployment with nothing under way. What a test changes is taken back."""
    wait_until_idle(served)
    yield served
    noised = model_hash(claim / NOISED)
    if (served.draft_status().get("current") or {}).get("hash") == model_hash(resolve(GOOD_URI)):
        served.command_draft("rollback")
        wait_for("the old draft is back", lambda: served.running_drafts() == {noised}, timeout_s=60)
    served.patch(
        {
            "replicas": 1,
            "model": {"uri": TARGET_URI},
            "speculation": {"draft": {"uri": NOISED_URI}},
            "distillation": {"trigger": {"cooldown": "1s"}},
        }
    )
    first = {"target": model_hash(resolve(TARGET_URI)), "draft": noised}
    wait_for("one worker of the beginning", lambda: models_of(served) == [first], timeout_s=180, every_s=1)
    wait_for("the others are gone", lambda: len(served.all_pods()) == 1, timeout_s=60)


@PHASES
@pytest.mark.parametrize("kind", ["draft", "target"])
def test_model_of_the_user_serves(endpoint: Endpoint, claim: Path, kind: str, phase: str) -> None:
    folder = OWN if kind == "draft" else TARGET
    uri = {"uri": f"pvc://{CLAIM}/{folder}"}
    changed = {"speculation": {"draft": uri}} if kind == "draft" else {"model": uri}
    with served_meanwhile(endpoint, clients=CLIENTS, replaced=True):
        run, wanted = enter(endpoint, phase), {model_hash(claim / folder)}
        change(endpoint, changed, phase, lambda: {models[kind] for models in models_of(endpoint)} == wanted)
        wait_for_superseded(endpoint, phase, run)


@PHASES
def test_replicas_of_the_user_serve(endpoint: Endpoint, claim: Path, phase: str) -> None:
    """The run or the trial goes on."""
    with served_meanwhile(endpoint, clients=CLIENTS, replaced=True):
        run, before = enter(endpoint, phase), endpoint.identities()
        change(endpoint, {"replicas": 2}, phase, lambda: len(models_of(endpoint)) == 2)
        assert before < endpoint.identities()
        status = endpoint.draft_status()
        assert run in (None, (status.get("run") or {}).get("id"), (status.get("lastRun") or {}).get("id")), status
        if phase in ("Collecting", "Canary", "Cooldown"):
            assert status.get("phase") == phase, status
        if phase in (*RUNS, "Canary") and endpoint.draft_status().get("phase") != "Serving":
            endpoint.command_draft("reject")  # unless the run has ended meanwhile, without a draft to try
        if phase == "Promoting":
            good = model_hash(resolve(GOOD_URI))
            wait_for("the promotion ends", lambda: endpoint.running_drafts() == {good}, timeout_s=SECONDS)


def change(endpoint: Endpoint, spec: Manifest, phase: str, is_done: Callable[[], bool]) -> None:
    """Change the spec, which must take effect within SECONDS."""
    began = time.monotonic()
    endpoint.patch(spec)
    wait_for(f"{phase}: the user's {spec}", is_done, timeout_s=SECONDS)
    print(f"\n{phase}: {spec} after {time.monotonic() - began:.0f} s")


def enter(endpoint: Endpoint, phase: str) -> str | None:
    """Lead the deployment into a phase and return the run, if one is under way."""
    match phase:
        case "Collecting":
            endpoint.command_draft("distill")
            return wait_for_run(endpoint, phase)
        case "Distilling":
            return begin(endpoint)
        case "Canary":
            offer(endpoint, blockRequests=4)
            wait_for("the trial runs", endpoint.trial_pod, timeout_s=60)
        case "Promoting":
            offer(endpoint, blockRequests=1)
            wait_for_phase(endpoint, phase, VERDICT_SECONDS)
        case "RollingBack":
            offer(endpoint, blockRequests=1)
            wait_for_phase(endpoint, "Cooldown", VERDICT_SECONDS)
            endpoint.command_draft("rollback")
            wait_for_phase(endpoint, phase, SECONDS)
        case "Cooldown":
            endpoint.patch({"distillation": {"trigger": {"cooldown": "10m"}}})
            endpoint.command_draft("distill")
            wait_for_run(endpoint, *RUNS)
            endpoint.command_draft("reject")
            wait_for_phase(endpoint, phase, SECONDS)
    return None


def offer(endpoint: Endpoint, **settings: int) -> None:
    """Offer the embedded head, which is faster. A promotion is followed by a long phase Cooldown."""
    endpoint.patch({"draftRollout": settings, "distillation": {"trigger": {"cooldown": "10m"}}})
    endpoint.offer_draft(GOOD_URI, model_hash(resolve(GOOD_URI)))


def wait_for_phase(endpoint: Endpoint, phase: str, timeout_s: float) -> None:
    """Wait for a phase, which may last for seconds only."""
    wait_for(f"phase {phase}", lambda: endpoint.draft_status().get("phase") == phase, timeout_s=timeout_s, every_s=0.1)


def models_of(endpoint: Endpoint) -> list[dict[str, str]]:
    """Return the hashes of target and draft of every ready worker."""
    reports = [endpoint.report(pod) for pod in endpoint.ready_pods()]
    return [{"target": report.target, "draft": report.draft.hash} for report in reports]


def wait_for_superseded(endpoint: Endpoint, phase: str, run: str | None) -> None:
    """Check how what was under way ended: superseded, with no Job left."""
    if run is not None:
        assert wait_for_end(endpoint, run)["outcome"] == "Superseded"
        wait_for("no Job is left", lambda: not jobs(endpoint), timeout_s=60)
    if phase == "Canary":
        assert endpoint.ended_drafts()[0]["outcome"] == "Superseded", endpoint.drafts()
    assert endpoint.draft_status().get("phase") in (None, "Serving")
