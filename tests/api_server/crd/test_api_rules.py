"""Rules of the resource on the API server.

A real API server judges the CEL rules, in server-side dry runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdecode_operator.api.v1alpha1 import PLURAL, VERSION
from support.kind_copy import KindCopy
from support.kube import ROOT, KubectlError
from support.operators.api_examples import BAD, GOOD, NAMES, RESERVED, TYPOS, spec_with

EXAMPLES = sorted([*(ROOT / "examples").glob("*.yaml"), *(ROOT / "examples" / "reference").glob("*.yaml")])


@pytest.mark.parametrize("change", GOOD, ids=str)
def test_the_api_server_accepts_valid_specs(api: KindCopy, change: dict[str, Any]) -> None:
    assert "created" in api.dry_run(spec_with(change))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_api_server_accepts_the_examples(api: KindCopy, path: Path) -> None:
    (document,) = yaml.safe_load_all(path.read_text())
    assert "created" in api.dry_run(document["spec"])


UNKNOWN = [(change, "unknown field") for change in (*TYPOS, *RESERVED)]


@pytest.mark.parametrize(("change", "words"), [*BAD, *UNKNOWN], ids=str)
def test_the_api_server_refuses_invalid_specs(api: KindCopy, change: dict[str, Any], words: str) -> None:
    with pytest.raises(KubectlError, match=words):
        api.dry_run(spec_with(change))


@pytest.mark.parametrize(("name", "is_valid"), NAMES.items())
def test_the_api_server_refuses_names_that_cannot_become_a_service(api: KindCopy, name: str, is_valid: bool) -> None:
    if is_valid:
        assert "created" in api.dry_run(spec_with({}), name=name)
        return
    with pytest.raises(KubectlError, match=r"becomes the name of a Service|RFC 1123"):
        api.dry_run(spec_with({}), name=name)


def test_the_api_server_refuses_a_share_for_the_deployment_itself(api: KindCopy) -> None:
    change = {"router": {"replicas": 2, "trafficSplit": [{"deployment": "llama", "percent": 10}]}}
    assert "created" in api.dry_run(spec_with(change), name="other")
    with pytest.raises(KubectlError, match="names other deployments"):
        api.dry_run(spec_with(change), name="llama")


def test_replicas_cannot_be_changed_while_the_operator_owns_them(api: KindCopy, namespace: str) -> None:
    """The one rule over time: it needs a stored object."""
    cluster, scale = api.cluster, ("scale", f"{api.resource}/owned", "--replicas=3")
    cluster.apply(api.manifest(spec_with({"scaling": {"owner": "Operator"}}), "owned"), namespace=namespace)
    with pytest.raises(KubectlError, match=r"scaling\.owner is Operator"):
        cluster.kubectl(*scale, namespace=namespace)
    cluster.apply(api.manifest(spec_with({"scaling": {"owner": "External"}}), "owned"), namespace=namespace)
    cluster.kubectl(*scale, namespace=namespace)
    path = f"/apis/{api.group}/{VERSION}/namespaces/{namespace}/{PLURAL}/owned/scale"
    assert json.loads(cluster.kubectl("get", "--raw", path))["spec"]["replicas"] == 3


def test_two_managers_apply_tasks_of_their_own(api: KindCopy, namespace: str) -> None:
    """Two field managers, such as a manifest in git and the plugin, do not remove items of each other."""

    def apply(manager: str, spec: dict[str, Any]) -> None:
        words = ("apply", "--server-side", "--validate=false", f"--field-manager={manager}", "-f", "-")
        api.cluster.kubectl(*words, namespace=namespace, stdin=json.dumps(api.manifest(spec, "shared")))

    def tasks() -> dict[str, Any]:
        stored = api.cluster.get(api.resource, "shared", namespace)["spec"]["speculation"]["tasks"]
        return {task["name"]: task.get("pin") for task in stored}

    apply("git", spec_with({"speculation": {"tasks": [{"name": "code"}, {"name": "chat"}]}}))
    apply("person", {"speculation": {"tasks": [{"name": "code", "pin": "chain:3"}, {"name": "other", "pin": "none"}]}})
    assert tasks() == {"code": "chain:3", "chat": None, "other": "none"}
    apply("git", spec_with({"speculation": {"tasks": [{"name": "code"}]}}))
    assert tasks() == {"code": "chain:3", "other": "none"}
