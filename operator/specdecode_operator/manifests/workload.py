"""The child Deployment: its pods' template, and how it rolls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.manifests.identity import SPEC_HASH_ANNOTATION, metadata, selector, worker_name
from specdecode_operator.manifests.template import STARTUP_SECONDS
from specdecode_operator.types import Deployment, Manifest


def workload(deployment: Deployment, template: Mapping[str, Any], spec_hash: str, replicas: int) -> Manifest:
    """A new pod must serve before an old one goes."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, worker_name(deployment.name), annotations={SPEC_HASH_ANNOTATION: spec_hash}),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "selector": {"matchLabels": selector(deployment.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": template,
        },
    }


def resolved_image(template: Mapping[str, Any]) -> str:
    """Image of the worker container."""
    containers = template.get("spec", {}).get("containers", [])
    return next((str(found.get("image", "")) for found in containers if found.get("name") == "worker"), "")
