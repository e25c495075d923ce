"""Check that an API server with the published CRDs of the gateway projects accepts examples/gateway.

The CRDs are those of the Go modules of the two projects, served in groups of their own: the cluster may have others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from specdecode_operator.api.v1alpha1 import GROUP
from support.kube import ROOT, Cluster, Manifest, wait_for
from support.tiers import skip_reason

CRDS = (
    (
        "sigs.k8s.io/gateway-api-inference-extension@v1.6.0",
        "h1:cjtwMJYcTnLXBYE5ffR1/hHhn7U1aIFfe2RITYmOXVA=",
        "config/crd/bases/inference.networking.k8s.io_inferencepools.yaml",
    ),
    (
        "sigs.k8s.io/gateway-api@v1.6.3",
        "h1:lKpJa5bGlraC/QeACvCpsHLdmO6y0iKfzVl6gzaFEYc=",
        "config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
    ),
)
"""Module, its hash, and the file of a CRD in it."""


class PublishedKinds:
    """Published kinds that the cluster serves, each in a group whose name begins with ``prefix``."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._prefix = cluster, f"test-{uuid.uuid4().hex[:6]}"
        self._groups: dict[str, str] = {}
        self._resources: list[str] = []

    def serve(self, definition: Manifest) -> None:
        """Serve a kind, and wait until the API server validates it strictly."""
        spec = definition["spec"]
        self._groups[spec["group"]] = f"{self._prefix}-{len(self._groups)}.{GROUP}"
        copy = self._renamed(definition)
        copy["spec"]["names"] |= {"shortNames": [], "categories": []}
        self._resources.append(copy["metadata"]["name"])
        self._cluster.apply(copy, server_side=True)
        (version, *_) = (one["name"] for one in spec["versions"] if one["storage"])
        explain = ("explain", spec["names"]["plural"], "--api-version", f"{copy['spec']['group']}/{version}")
        wait_for("the kind is in the OpenAPI document", lambda: self._cluster.kubectl(*explain))

    def dry_run(self, manifest: Manifest) -> str:
        """Ask the API server for a dry run of a creation; raises KubectlError with its reason."""
        words = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
        return self._cluster.kubectl(*words, namespace="default", stdin=json.dumps(self._renamed(manifest)))

    def delete(self) -> None:
        """Delete the kinds."""
        if self._resources:
            self._cluster.kubectl("delete", "crd", *self._resources, "--wait=false")

    def _renamed(self, manifest: Manifest) -> Manifest:
        text = json.dumps(manifest)
        for group, copy in self._groups.items():
            text = text.replace(group, copy)
        renamed: Manifest = json.loads(text)
        return renamed


def published(module: str, digest: str, path: str) -> Manifest:
    """Return a CRD of a Go module."""
    if shutil.which("go") is None:
        pytest.skip(skip_reason("go", "the CRDs come from Go modules"))
    done = subprocess.run(["go", "mod", "download", "-json", module], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    downloaded = json.loads(done.stdout)
    assert downloaded["Sum"] == digest
    definition: Manifest = yaml.safe_load(Path(downloaded["Dir"], path).read_text())
    return definition


@pytest.fixture(scope="module")
def kinds(cluster: Cluster) -> Iterator[PublishedKinds]:
    definitions = [published(*crd) for crd in CRDS]
    kinds = PublishedKinds(cluster)
    try:
        for definition in definitions:
            kinds.serve(definition)
        yield kinds
    finally:
        kinds.delete()


def documents() -> list[Manifest]:
    files = sorted((ROOT / "examples" / "gateway").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def test_published_kinds_accept_the_gateway_examples(kinds: PublishedKinds) -> None:
    found = documents()
    assert [document["kind"] for document in found] == ["HTTPRoute", "InferencePool", "HTTPRoute"]
    for document in found:
        assert "created" in kinds.dry_run(document)
