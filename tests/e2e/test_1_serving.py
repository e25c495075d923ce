"""The API server's part: unknown fields are refused, the examples are admitted, and `helm test` passes."""

from __future__ import annotations

import json

from support.e2e.endpoint import Endpoint
from support.e2e.kube import Namespace
from support.e2e.release import Release
from support.kube import ROOT


def test_an_unknown_field_is_refused_by_name(endpoint: Endpoint) -> None:
    valid = endpoint.get()
    bad = {"apiVersion": valid["apiVersion"], "kind": valid["kind"], "metadata": {"name": "bad"}}
    bad["spec"] = {**valid["spec"], "repicas": 2}
    said = endpoint.namespace.refusal("create", "--filename", "-", stdin=json.dumps(bad))
    assert 'unknown field "spec.repicas"' in said


def test_examples_pass_the_api_server(watched: Namespace, release: Release) -> None:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        assert "dry run" in watched.kubectl("apply", "--dry-run=server", "--filename", str(path))


def test_helm_test_sees_a_bad_resource_refused(release: Release) -> None:
    said = release.test()
    assert "min 4, initial 3, max 2: 422" in said
    assert "min 0, initial 3, max 5: 201" in said
