"""Copies of kinds in API groups of their own, for tests of schemas on an API server.

The cluster may serve the kinds already, with the schemas of other versions, and other tests rely on that. A copy shares
no name with the original, so both can be served at the same time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from support.kube import Cluster, Manifest, wait_for


@dataclass(frozen=True, slots=True)
class KindCopy:
    """A served copy of a kind, by default of SpecDecodeDeployments."""

    cluster: Cluster
    group: str
    original: str = GROUP
    """Group of the kind that is copied."""

    @property
    def resource(self) -> str:
        """Name of the resource for kubectl."""
        return f"{PLURAL}.{self.group}"

    def manifest(self, spec: Mapping[str, Any], name: str = "rules") -> dict[str, Any]:
        return {
            "apiVersion": f"{self.group}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name},
            "spec": dict(spec),
        }

    def dry_run(self, spec: Mapping[str, Any], name: str = "rules") -> str:
        """Ask the API server for a dry run of a creation; raises KubectlError with its reason."""
        return self.dry_run_of(self.manifest(spec, name))

    def dry_run_of(self, manifest: Manifest) -> str:
        """Ask likewise for a whole object."""
        words = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
        return self.cluster.kubectl(*words, namespace="default", stdin=json.dumps(manifest))

    def renamed(self, manifest: Manifest) -> Manifest:
        """Return a manifest with the group of the copy in place of the original's."""
        copied: Manifest = json.loads(json.dumps(manifest).replace(self.original, self.group))
        return copied


@contextmanager
def served_copy(cluster: Cluster, original: Manifest | None = None) -> Iterator[KindCopy]:
    """Serve a copy of a kind while the block runs, of SpecDecodeDeployments if no other definition is given."""
    original = original or crd.crd()
    copy = KindCopy(cluster, f"test-{uuid.uuid4().hex[:6]}.{GROUP}", original["spec"]["group"])
    definition = copy.renamed(original)
    names = definition["spec"]["names"] = definition["spec"]["names"] | {"shortNames": [], "categories": []}
    (version,) = (one["name"] for one in definition["spec"]["versions"] if one["storage"])
    cluster.apply(definition, server_side=True)
    try:
        everywhere = ("get", definition["metadata"]["name"], "--all-namespaces")
        wait_for("the copy of the kind is served", lambda: cluster.kubectl(*everywhere) is not None)
        # The API server adds a kind to its OpenAPI document later than it serves the kind.
        explain = ("explain", names["plural"], "--api-version", f"{copy.group}/{version}")
        wait_for("the copy of the kind is in the OpenAPI document", lambda: cluster.kubectl(*explain))
        yield copy
    finally:
        cluster.kubectl("delete", "crd", definition["metadata"]["name"], "--wait=false")
