"""Tests of the resource's models. The API server judges the rules: tests/api_server/crd/test_api_rules.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from specdecode_operator.api import crd
from specdecode_operator.api.distillation import DistillationSpec, DistillationStorageSpec
from specdecode_operator.api.draft import DraftResourceSpec
from specdecode_operator.api.v1alpha1 import Spec
from specdecode_operator.times import seconds_of
from support.operators.api_examples import BAD, GOOD, spec_with


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_valid_specs_are_parsed(change: dict[str, Any]) -> None:
    Spec.model_validate(spec_with(change), extra="forbid")


def rules_of(node: Any) -> Iterator[str]:
    """Yield the messages of all rules of a schema, but for rules over time."""
    if isinstance(node, dict):
        rules = node.get("x-kubernetes-validations", ())
        yield from (rule["message"] for rule in rules if "oldSelf" not in rule["rule"])
        for inner in node.values():
            yield from rules_of(inner)


def test_every_rule_has_an_example_that_it_alone_refuses() -> None:
    """The API server must refuse the example with this message, so a rule that is dropped does not go unnoticed."""
    messages = set(rules_of(crd.root_schema()["properties"]["spec"]))
    assert len(messages) > 30
    sentences = [words for _, words in BAD if " " in words]
    assert [message for message in sorted(messages) if not any(re.search(one, message) for one in sentences)] == []


@pytest.mark.parametrize(
    ("duration", "seconds"), [("1h30m", 5400), ("90s", 90), ("2h", 7200), ("500ms", 0.5), ("22.5ms", 0.0225)]
)
def test_durations_have_seconds(duration: str, seconds: float) -> None:
    assert seconds_of(duration) == pytest.approx(seconds)


# --- storage of drafts ----------------------------------------------------------------------------------------------


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
    given = {"deploymentRef": {"name": "demo"}, "uri": uri, "hash": "0123456789abcdef"}
    assert DraftResourceSpec.model_validate(given).uri == uri


@pytest.mark.parametrize("uri", ["s3://models", "s3://models/", "s3:///path", "s3://Models/x", "s3://models/a b"])
def test_a_uri_names_a_path_in_a_bucket(uri: str) -> None:
    with pytest.raises(ValidationError):
        DraftResourceSpec.model_validate({"deploymentRef": {"name": "demo"}, "uri": uri, "hash": "0123456789abcdef"})
