"""Drafts in a bucket: the pods of Jobs and workers get the key, and a run writes to a folder of its pod."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator import manifests
from specdecode_operator.manifests.pods import bucket_environment, pod_template
from specdecode_operator.state.learned import RunRecord
from support.operators.fleet import DEFAULTS, deployment_with

S3 = {"uri": "s3://models/team", "endpoint": "https://s3.example.com", "secretRef": {"name": "key"}}
RUN = RunRecord(id="6740f2a1", started=1.0, draft_uri="s3://models/head", bucket="s3://models/team")


def pods(s3: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the pods of the Job and of a worker."""
    deployment = deployment_with(distillation={"storage": s3 or {"uri": "pvc://drafts"}})
    run = RUN if s3 else RUN.model_copy(update={"bucket": "", "claim": "drafts"})
    job = manifests.distillation_job(deployment, run, DEFAULTS)
    return {"job": job["spec"]["template"]["spec"], "worker": pod_template(deployment, DEFAULTS)["spec"]}


@pytest.mark.parametrize("pod", ["job", "worker"])
def test_all_containers_that_read_or_write_drafts_have_the_key(pod: str) -> None:
    made = pods(S3)[pod]
    for container in (*made["initContainers"], *made["containers"]):
        env = {one["name"]: one for one in container["env"]}
        assert (env["AWS_ENDPOINT_URL_S3"]["value"], env["AWS_REGION"]["value"]) == (S3["endpoint"], "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert env[name]["valueFrom"] == {"secretKeyRef": {"name": "key", "key": name}}
        assert env["AWS_SESSION_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
        assert len(env) == len(container["env"]), "no name stands twice"
    assert "AWS_" not in str(pods(None)[pod])


def test_a_run_writes_to_a_bounded_folder_and_publishes_to_the_bucket() -> None:
    made = pods(S3)["job"]
    (container,) = made["containers"]
    (scratch,) = (one for one in made["volumes"] if one["name"] == "scratch")
    assert scratch["emptyDir"] == {"sizeLimit": "64Gi"}
    (mount,) = (one for one in container["volumeMounts"] if one["name"] == "scratch")
    (out,) = (word for word in container["command"] if word.startswith("--out="))
    assert out == f"--out={mount['mountPath']}/distillation/demo/6740f2a1"
    assert "--publish=s3://models/team/drafts/demo" in container["command"]
    assert not any("persistentVolumeClaim" in one for one in made["volumes"])


def test_aws_needs_no_endpoint_and_users_variables_win_in_the_worker() -> None:
    s3 = {"uri": "s3://models", "secretRef": {"name": "key"}, "region": "eu-west-1"}
    mine = {"name": "worker", "env": [{"name": "AWS_REGION", "value": "mine"}]}
    template = {"spec": {"containers": [mine]}}
    deployment = deployment_with(distillation={"storage": s3}, workers={"template": template})
    assert "AWS_ENDPOINT_URL_S3" not in str(bucket_environment(deployment.spec))
    (worker,) = pod_template(deployment, DEFAULTS)["spec"]["containers"]
    assert [one["value"] for one in worker["env"] if one["name"] == "AWS_REGION"] == ["mine"]


def test_another_path_in_the_store_replaces_no_worker() -> None:
    first, path, key = (
        manifests.rolling_hash(deployment_with(distillation={"storage": {**S3, **change}}).spec)
        for change in ({}, {"uri": "s3://b12/other"}, {"secretRef": {"name": "other"}})
    )
    assert first == path != key
