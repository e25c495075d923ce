"""A stand-in for a model hub in a pod with the worker's image, behind a Service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.e2e.kube import Namespace

PORT = 8080


@contextmanager
def hub_in_pod(namespace: Namespace, name: str, files: Mapping[str, Path]) -> Iterator[None]:
    """Run the program ``hub.py`` of these files, by their places in the pod, while a block runs."""
    keys = {place.replace("/", "-"): place for place in files}
    metadata = {"name": name, "labels": {"app": name}}
    items = [{"key": key, "path": place} for key, place in keys.items()]
    container = {
        "name": "hub",
        "image": namespace.cluster.worker_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "/hub/hub.py"],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "timeoutSeconds": 5},
        "volumeMounts": [{"name": "files", "mountPath": "/hub"}],
    }
    volumes = [{"name": "files", "configMap": {"name": name, "items": items}}]
    pod = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 1}
    service = {"selector": {"app": name}, "ports": [{"port": PORT}]}
    data = {key: files[place].read_text() for key, place in keys.items()}
    for kind, fields in (("ConfigMap", {"data": data}), ("Pod", {"spec": pod}), ("Service", {"spec": service})):
        namespace.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields})
    namespace.kubectl("wait", "pod", name, "--for=condition=Ready", "--timeout=180s", timeout_s=200)
    yield
    namespace.kubectl("delete", "pod,service,configmap", name, "--grace-period=1", "--ignore-not-found")
