"""A pod and a Service on the booted cluster: what a boot must make possible, and what makes a machine dirty."""

from __future__ import annotations

import json

from localcluster.console import step
from localcluster.control_plane import kubectl
from localcluster.settings import COREDNS_IMAGE, Layout

_NAME = "trial"


def run_pod(layout: Layout) -> None:
    """Run a second DNS server as an ordinary workload behind a Service; it stays until the cluster goes."""
    with step("Running a pod behind a Service"):
        for document in (_deployment(), _service()):
            kubectl(layout, "apply", "-f", "-", stdin=json.dumps(document))
        kubectl(layout, "rollout", "status", f"deployment/{_NAME}", "--timeout=120s")


def _deployment() -> dict[str, object]:
    container = {
        "name": _NAME,
        "image": COREDNS_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["-dns.port=1053"],
        "resources": {"limits": {"memory": "128Mi", "cpu": "500m"}},
        "readinessProbe": {"tcpSocket": {"port": 1053}, "timeoutSeconds": 5},
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    pod = {"containers": [container], "volumes": [{"name": "scratch", "emptyDir": {"medium": "Memory"}}]}
    labels = {"app": _NAME}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": _NAME},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _service() -> dict[str, object]:
    port = {"port": 53, "targetPort": 1053, "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": _NAME},
        "spec": {"type": "NodePort", "selector": {"app": _NAME}, "ports": [port]},
    }
