"""The revision of the operator under test.

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
from pathlib import Path

from support.kube import ROOT, Cluster

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
