"""A Job with the operator's own flags and variables publishes to a real S3 server, where a worker's `pull` finds it."""

from __future__ import annotations

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
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.download import Bucket
from specdecode_worker.models.fetch import model_hash
from support.storage_servers.s3_server import S3Server, s3_server
from support.worker.job_runs import read, run

pytestmark = pytest.mark.slow

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
    assert run(flags, out, "--prune", publish) == 0
    draft = read(message).draft
    assert problem_of_draft(draft, published_prefix(RUN.place, "demo")) == ""
    assert draft.uri == f"s3://heads/team/drafts/demo/{model_hash(out / 'head')}"
    cache = tmp_path / "cache"
    assert main(["pull", "--cache-dir", str(cache), draft.uri]) == 0
    assert model_hash(model_store.resolve(draft.uri, cache)) == draft.hash


def test_a_wrong_key_is_refused_before_the_run(
    deployment: Deployment, flags: list[str], message: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert run(flags, tmp_path / "out", "--publish", "s3://heads/team/drafts/demo") == 0
    refused = read(message)
    assert (refused.verdict, refused.failure) == ("failed", "publish")
    assert "denies access" in refused.reasons[0]
    assert not (tmp_path / "out" / "golden").exists()
