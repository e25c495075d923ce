"""Storage of drafts in the resource: a claim or a bucket, and the URIs of drafts in buckets."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api.crd import root_schema
from specdecode_operator.api.distillation import ONE_STORAGE_MESSAGE, STORAGE_MESSAGE, DistillationSpec
from specdecode_operator.api.rollout import DraftCandidateSpec

S3 = {"bucket": "models", "secret": "key"}


def test_a_bucket_has_defaults_and_a_uri() -> None:
    storage = DistillationSpec.model_validate({"storage": {"s3": S3}}).storage
    assert storage.s3 is not None
    assert storage.is_set
    assert (storage.s3.uri, storage.s3.region, storage.s3.endpoint) == ("s3://models", "us-east-1", None)
    more = DistillationSpec.model_validate({"storage": {"s3": {**S3, "prefix": "team/a"}}}).storage
    assert more.s3 is not None
    assert more.s3.uri == "s3://models/team/a"


def test_there_is_one_place_or_none() -> None:
    with pytest.raises(ValidationError, match=ONE_STORAGE_MESSAGE):
        DistillationSpec.model_validate({"storage": {"s3": S3, "claim": "drafts"}})
    rules = root_schema()["properties"]["spec"]["properties"]["distillation"]["properties"]["storage"]
    assert rules["x-kubernetes-validations"] == [
        {"rule": "!has(self.claim) || !has(self.s3)", "message": ONE_STORAGE_MESSAGE}
    ]
    assert not DistillationSpec().storage.is_set


def test_runs_by_themselves_need_a_place_and_a_bucket_is_one() -> None:
    spec: dict[str, Any] = {"capture": {"enabled": True}, "trigger": {"mode": "Drift"}}
    with pytest.raises(ValidationError, match=STORAGE_MESSAGE):
        DistillationSpec.model_validate(spec)
    DistillationSpec.model_validate({**spec, "storage": {"s3": S3}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": "Models"},
        {"bucket": "a/b"},
        {"prefix": "/a"},
        {"prefix": "a/"},
        {"prefix": "a/../b"},
        {"endpoint": "s3.example.com"},
        {"endpoint": "https://s3.example.com/path"},
        {"secret": "A b"},
        {"secret": None},
        {"scratch": "much"},
    ],
    ids=str,
)
def test_values_that_no_store_takes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DistillationSpec.model_validate({"storage": {"s3": {**S3, **wrong}}})


@pytest.mark.parametrize("uri", ["s3://models/drafts/demo/0123456789abcdef", "s3://a.b-c/x"])
def test_a_draft_may_lie_in_a_bucket(uri: str) -> None:
    assert DraftCandidateSpec.model_validate({"uri": uri, "hash": "0123456789abcdef"}).uri == uri


@pytest.mark.parametrize("uri", ["s3://models", "s3://models/", "s3:///path", "s3://Models/x", "s3://models/a b"])
def test_a_uri_names_a_path_in_a_bucket(uri: str) -> None:
    with pytest.raises(ValidationError):
        DraftCandidateSpec.model_validate({"uri": uri, "hash": "0123456789abcdef"})
