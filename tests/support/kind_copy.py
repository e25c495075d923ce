"""Copy of the resource's kind in an API group of its own, for tests of the schema on an API server.

The cluster may serve the kind already, with the schema of another version, and other tests rely on that. The copy has
the schema of this tree. It shares no name with the original, so both can be served at the same time.
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
from support.kube import Cluster, wait_for


@dataclass(frozen=True, slots=True)
class KindCopy:
    """A served copy of the kind."""

    cluster: Cluster
    group: str

    @property
    def resource(self) -> str:
        """Name of the resource for kubectl."""
        return f"{PLURAL}.{self.group}"

    def manifest(self, spec: Mapping[str, Any], name: str = "rules") -> dict[str, Any]:
        """Return an object of the kind."""
        return {
            "apiVersion": f"{self.group}/{VERSION}",
            "kind": KIND,
            "metadata": {"name": name},
            "spec": dict(spec),
        }

    def dry_run(self, spec: Mapping[str, Any], name: str = "rules") -> str:
        """Ask the API server for a dry run of a creation; raises KubectlError with its reason."""
        words = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
        return self.cluster.kubectl(*words, namespace="default", stdin=json.dumps(self.manifest(spec, name)))


@contextmanager
def served_copy(cluster: Cluster, schema: Mapping[str, Any] | None = None) -> Iterator[KindCopy]:
    """Serve a copy of the kind while the block runs, with another schema if one is given."""
    copy = KindCopy(cluster, f"test-{uuid.uuid4().hex[:6]}.{GROUP}")
    definition = json.loads(json.dumps(crd.crd()).replace(GROUP, copy.group))
    if schema is not None:
        definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = schema
    definition["spec"]["names"] |= {"shortNames": [], "categories": []}
    cluster.apply(definition, server_side=True)
    try:
        everywhere = ("get", copy.resource, "--all-namespaces")
        wait_for("the copy of the kind is served", lambda: cluster.kubectl(*everywhere) is not None)
        # The API server adds a kind to its OpenAPI document later than it serves the kind.
        explain = ("explain", PLURAL, "--api-version", f"{copy.group}/{VERSION}")
        wait_for("the copy of the kind is in the OpenAPI document", lambda: cluster.kubectl(*explain))
        yield copy
    finally:
        cluster.kubectl("delete", "crd", copy.resource, "--wait=false")
