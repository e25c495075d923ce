"""Publication of candidates: a complete folder named by its hash, or none, and the verdict names it.

A Job with the operator's own flags and variables publishes to a real S3 server, where a worker's `pull` finds it.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.drafts.job_status import problem_of_draft, published_prefix
from specdecode_operator.manifests.pods import bucket_environment
from specdecode_operator.state.learned import RunRecord
from specdecode_operator.types import Defaults, Deployment
from specdecode_worker.__main__ import main
from specdecode_worker.contract import Artifact
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.download import Bucket
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.distillation.publication import check_place, publish
from specdecode_worker.training.errors import PublishFailed
from support.storage_servers.s3_server import S3Server, s3_server
from support.worker.distillation_runs import run_job

pytestmark = pytest.mark.slow


@pytest.fixture
def claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a mounted claim named ``heads``."""
    monkeypatch.setattr(model_store, "CLAIMS", tmp_path / "mnt")
    folder = tmp_path / "mnt" / "heads"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def head(draft: Path, tmp_path: Path) -> Path:
    """Return a head with a calibration and a lineage."""
    folder = tmp_path / "head"
    shutil.copytree(draft, folder)
    (folder / "calibration.json").write_text("{}")
    (folder / "lineage.json").write_text("{}")
    return folder


@pytest.mark.parametrize("prefix", ["pvc://heads/drafts/sql", "pvc://heads/drafts/sql/", "pvc://heads"])
def test_draft_is_published_under_its_hash(prefix: str, claim: Path, head: Path) -> None:
    check_place(prefix)
    artifact = publish(head, prefix)
    assert artifact == Artifact(uri=f"{prefix.rstrip('/')}/{model_hash(head)}", hash=model_hash(head))
    folder = model_store.resolve(artifact.uri)
    assert folder.is_relative_to(claim)
    assert {path.name for path in folder.iterdir()} == {path.name for path in head.iterdir()}
    assert model_hash(folder) == artifact.hash
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755, "workers have another user"
    before = folder.stat().st_ino
    assert publish(head, prefix) == artifact
    assert folder.stat().st_ino == before, "a repeated run copies nothing"
    assert [path.name for path in folder.parent.iterdir()] == [artifact.hash]


def test_leftovers_of_a_killed_run_are_removed(claim: Path, head: Path) -> None:
    draft_hash = model_hash(head)
    (claim / f".{draft_hash}.killed").mkdir()
    (claim / draft_hash).mkdir()
    (claim / draft_hash / "config.json").write_text("{")
    publish(head, "pvc://heads")
    assert [path.name for path in claim.iterdir()] == [draft_hash]
    assert model_hash(claim / draft_hash) == draft_hash


def test_unpublished_draft_is_not_visible(claim: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = shutil.copyfile

    def tear(source: Path, target: Path) -> None:
        copied(source, target)
        if target.suffix == ".safetensors":
            os.truncate(target, target.stat().st_size // 2)

    monkeypatch.setattr(shutil, "copyfile", tear)
    with pytest.raises(PublishFailed, match="other contents"):
        publish(head, "pvc://heads")
    assert list(claim.iterdir()) == []


@pytest.mark.parametrize(
    ("prefix", "named"),
    [
        ("pvc://other/drafts", "other is not mounted"),
        ("pvc://heads/../../etc", "names no folder in a claim"),
        ("hf://org/name", "cannot be published"),
        ("drafts", "cannot be published"),
        ("file:///proc/drafts", "cannot be written"),
    ],
)
def test_place_that_cannot_be_used_is_named(prefix: str, named: str, claim: Path) -> None:
    with pytest.raises(PublishFailed, match=named):
        check_place(prefix)


RUN = RunRecord(id="6740f2a1", started=1.0, draft_uri="embedded://draft", bucket="s3://heads/team")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def deployment(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Return a deployment with drafts on the server, whose variables are set in this process."""
    storage = {"uri": "s3://heads/team", "endpoint": server.url, "secretRef": {"name": "key"}}
    document = {"model": {"uri": "embedded://m"}, "distillation": {"storage": storage}}
    made = Deployment(
        namespace="ns", name="demo", uid="u1", generation=1, spec=Spec.model_validate(document), status=Status()
    )
    for one in bucket_environment(made.spec):
        key = one.get("valueFrom", {}).get("secretKeyRef", {})
        value = one.get("value") or server.environment.get(key["key"])
        assert value or key.get("optional"), one["name"]
        monkeypatch.setenv(one["name"], value) if value else monkeypatch.delenv(one["name"], raising=False)
    obstore.put(Bucket("s3://heads/any").store, "object", b"the bucket exists")
    return made


def test_a_published_draft_is_taken_by_the_operator_and_pulled(
    deployment: Deployment, flags: list[str], message: Path, tmp_path: Path
) -> None:
    job = manifests.distillation_job(deployment, RUN, Defaults(worker_image="w", worker_image_pull_policy="Never"))
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    (publish,) = (word for word in command if word.startswith("--publish="))
    out = tmp_path / "scratch" / "6740f2a1"
    draft = run_job(message, flags, out, "--prune", publish).draft
    assert problem_of_draft(draft, published_prefix(RUN.place, "demo")) == ""
    assert draft.uri == f"s3://heads/team/drafts/demo/{model_hash(out / 'head')}"
    cache = tmp_path / "cache"
    assert main(["pull", "--cache-dir", str(cache), draft.uri]) == 0
    assert model_hash(model_store.resolve(draft.uri, cache)) == draft.hash


def test_a_wrong_key_is_refused_before_the_run(
    deployment: Deployment, flags: list[str], message: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused = run_job(message, flags, tmp_path / "out", "--publish", "s3://heads/team/drafts/demo")
    assert (refused.verdict, refused.failure) == ("failed", "publish")
    assert "denies access" in refused.reasons[0]
    assert not (tmp_path / "out" / "golden").exists()
