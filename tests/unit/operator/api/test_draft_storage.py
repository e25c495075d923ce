"""Storage of drafts in the resource: a claim or a bucket, and the URIs of drafts in buckets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.distillation import DistillationSpec, DistillationStorageSpec
from specdecode_operator.api.draft import DraftResourceSpec


@pytest.mark.parametrize(
    ("uri", "claim", "bucket"),
    [
        ("pvc://drafts", "drafts", ""),
        ("s3://models", "", "s3://models"),
        ("s3://models/team/a", "", "s3://models/team/a"),
    ],
)
def test_a_storage_is_a_claim_or_a_bucket(uri: str, claim: str, bucket: str) -> None:
    storage = DistillationStorageSpec(uri=uri)
    assert (storage.claim, storage.bucket) == (claim, bucket)


@pytest.mark.parametrize(
    ("limits", "devices"),
    [
        ({"nvidia.com/gpu": 2, "cpu": "8"}, 2),
        ({"nvidia.com/gpu": 2, "rdma/hca": 1}, 2),
        ({"nvidia.com/mig-1g.10gb": "1", "memory": "8Gi"}, 1),
        ({"cpu": 4, "hugepages-2Mi": "1Gi", "requests.kubernetes.io/x": 3}, 0),
        ({"nvidia.com/gpu": "many"}, 0),
        ([], 0),
    ],
    ids=str,
)
def test_the_devices_of_a_run_are_those_of_its_container(limits: Any, devices: int) -> None:
    containers = [{"name": "other", "resources": {"limits": {"nvidia.com/gpu": 7}}}, {"name": "distill"}]
    containers[1]["resources"] = {"limits": limits}
    assert DistillationSpec(job_template={"spec": {"containers": containers}}).job_devices == devices


@pytest.mark.parametrize("template", [{}, {"spec": None}, {"spec": {"containers": {}}}, {"spec": {"containers": [1]}}])
def test_a_template_without_the_container_has_no_devices(template: dict[str, Any]) -> None:
    assert DistillationSpec(job_template=template).job_devices == 0


@pytest.mark.parametrize("uri", ["s3://models/drafts/demo/0123456789abcdef", "s3://a.b-c/x"])
def test_a_draft_may_lie_in_a_bucket(uri: str) -> None:
    assert (
        DraftResourceSpec.model_validate(
            {"deploymentRef": {"name": "demo"}, "uri": uri, "hash": "0123456789abcdef"}
        ).uri
        == uri
    )


@pytest.mark.parametrize("uri", ["s3://models", "s3://models/", "s3:///path", "s3://Models/x", "s3://models/a b"])
def test_a_uri_names_a_path_in_a_bucket(uri: str) -> None:
    with pytest.raises(ValidationError):
        DraftResourceSpec.model_validate({"deploymentRef": {"name": "demo"}, "uri": uri, "hash": "0123456789abcdef"})
