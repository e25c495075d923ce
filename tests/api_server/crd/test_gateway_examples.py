"""Check that an API server with the published CRDs of the gateway projects accepts examples/gateway.

The CRDs are those of the Go modules of the two projects, served in groups of their own: the cluster may have others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from support.kind_copy import served_copy
from support.kube import ROOT, Cluster, Manifest
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


def published(module: str, digest: str, path: str) -> Manifest:
    if shutil.which("go") is None:
        pytest.skip(skip_reason("go", "the CRDs come from Go modules"))
    done = subprocess.run(["go", "mod", "download", "-json", module], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    downloaded = json.loads(done.stdout)
    assert downloaded["Sum"] == digest
    definition: Manifest = yaml.safe_load(Path(downloaded["Dir"], path).read_text())
    return definition


def test_published_kinds_accept_the_gateway_examples(cluster: Cluster) -> None:
    definitions, files = [published(*crd) for crd in CRDS], sorted((ROOT / "examples" / "gateway").glob("*.yaml"))
    found = [document for file in files for document in yaml.safe_load_all(file.read_text())]
    assert [document["kind"] for document in found] == ["HTTPRoute", "InferencePool", "HTTPRoute"]
    with ExitStack() as stack:
        copies = [stack.enter_context(served_copy(cluster, definition)) for definition in definitions]
        for document in found:
            (copy,) = [one for one in copies if document["apiVersion"].startswith(f"{one.original}/")]
            assert "created" in copy.dry_run_of(copy.renamed(document))
