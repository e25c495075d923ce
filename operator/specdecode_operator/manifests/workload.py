"""Child Deployment: its pods and its rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdecode_operator.manifests.identity import SPEC_HASH_ANNOTATION, metadata, selector, worker_name
from specdecode_operator.manifests.template import STARTUP_SECONDS
from specdecode_operator.types import Deployment, Manifest


def workload(deployment: Deployment, template: Mapping[str, Any], spec_hash: str, replicas: int) -> Manifest:
    """Return the child Deployment.

    Args:
        deployment: Owner of the child.
        template: Pod template.
        spec_hash: Hash of the part of the spec that the template was made from.
        replicas: Number of workers.
    """
    strategy = {"maxSurge": deployment.spec.max_surge, "maxUnavailable": deployment.spec.max_unavailable}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, worker_name(deployment.name), annotations={SPEC_HASH_ANNOTATION: spec_hash}),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": STARTUP_SECONDS + 60,
            "selector": {"matchLabels": selector(deployment.name)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy},
            "template": template,
        },
    }


def resolved_image(template: Mapping[str, Any]) -> str:
    """Return the image of the worker container; empty if there is none."""
    containers = (template.get("spec") or {}).get("containers") or []
    images = (container.get("image") for container in containers if container.get("name") == "worker")
    return str(next(images, "") or "")
