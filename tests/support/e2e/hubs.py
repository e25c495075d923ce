"""The hub of support/published/hub_pod.py in a pod with the worker's image, behind a Service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from support.e2e.kube import Namespace
from support.kube import ROOT

PORT = 8080
SUPPORT = ROOT / "tests" / "support"
MODULES = ("small_model", "published/hub", "published/repositories")
FILES = {
    "hub.py": SUPPORT / "published" / "hub_pod.py",
    **{f"support/{name}.py": SUPPORT / f"{name}.py" for name in MODULES},
}
"""Files of the hub's pod by their places there."""


@contextmanager
def hub_in_pod(namespace: Namespace, name: str) -> Iterator[None]:
    keys = {place.replace("/", "-"): place for place in FILES}
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
    data = {key: FILES[place].read_text() for key, place in keys.items()}
    for kind, fields in (("ConfigMap", {"data": data}), ("Pod", {"spec": pod}), ("Service", {"spec": service})):
        namespace.apply({"apiVersion": "v1", "kind": kind, "metadata": metadata, **fields})
    namespace.kubectl("wait", "pod", name, "--for=condition=Ready", "--timeout=180s", timeout_s=200)
    yield
    namespace.kubectl("delete", "pod,service,configmap", name, "--grace-period=1", "--ignore-not-found")
