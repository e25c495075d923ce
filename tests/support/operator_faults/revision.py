"""The revision of the operator under test, and the adapter from a version-neutral spec to its CRD.

Environment variables select another revision than this tree's, for example an old one:

- OPERATOR_FAULTS_CHART: folder of the chart
- OPERATOR_FAULTS_IMAGE: image of the operator; stand-in workers use it too, because it has Python
- OPERATOR_FAULTS_CRD: file of the CustomResourceDefinition
- OPERATOR_FAULTS_SOURCE: source tree, for tests that run the operator as a process of this machine; chart and CRD are
  taken from it too unless they are given

The same variables with the prefix OPERATOR_FAULTS_FROM_ name the revision that the upgrade test starts from.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from support.kube import ROOT, Cluster, Manifest

CRD_NAME = "specdecodedeployments.specdecode.io"


@dataclass(frozen=True)
class Revision:
    """Chart, image, CRD and sources of one revision of the operator."""

    chart: Path
    image: str
    crd: Path
    source: Path

    @classmethod
    def from_environment(cls, cluster: Cluster, prefix: str = "OPERATOR_FAULTS_") -> Revision:
        """Return the revision that variables with a prefix select; this tree by default."""

        def value(name: str) -> str:
            return os.environ.get(prefix + name, "")

        source = Path(value("SOURCE") or ROOT)
        return cls(
            chart=Path(value("CHART") or source / "helm" / "specdecode"),
            image=value("IMAGE") or cluster.operator_image,
            crd=Path(value("CRD") or source / "crds" / f"{CRD_NAME}.yaml"),
            source=source,
        )

    @property
    def label(self) -> str:
        """Name of the revision in the record of figures: the tag of its image."""
        return self.image.rpartition(":")[2]

    @cached_property
    def _spec_properties(self) -> dict[str, Any]:
        """Schemas of the fields of ``spec`` in this revision's CRD."""
        document = yaml.safe_load(self.crd.read_text())
        schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        properties: dict[str, Any] = schema["properties"]["spec"]["properties"]
        return properties

    @property
    def direct_access(self) -> dict[str, Any]:
        """Fields of ``spec`` that keep routers away, so that clients reach the workers."""
        return {"router": {"replicas": 0}} if "router" in self._spec_properties else {}

    @cached_property
    def chart_values(self) -> Manifest:
        """Default values of the chart; the schema refuses other names."""
        values: Manifest = yaml.safe_load((self.chart / "values.yaml").read_text())
        return values

    def accelerator(self, resource: str = "", count: int = 0) -> dict[str, Any]:
        """Return the fields of ``spec.workers`` that request ``count`` units of an extended resource.

        Args:
            resource: Name of the extended resource; ignored for a count of 0.
            count: Units per worker; 0 means workers on the CPU.
        """
        return {"accelerator": {"count": count, **({"resource": resource} if count else {})}}
