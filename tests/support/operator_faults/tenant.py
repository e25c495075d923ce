"""A tenant: one namespace with deployments of stand-in workers, and what their users see of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from specdecode_operator.manifests.pods import merged
from support.kube import Manifest, is_ready, wait_for
from support.operator_faults.api_client import Api

SCRIPT = "stand-in-worker"
START_SECONDS = 90
SMALL = {"requests": {"cpu": "5m", "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": "128Mi"}}
LIVE_ANNOTATION = "test.specdecode.io/round"


class Tenant:
    """A namespace of the operator's watch list."""

    def __init__(self, api: Api, image: str, namespace: str) -> None:
        """``image`` is what stand-in workers run: that of the operator, because it has Python."""
        self.api = api
        self.image = image
        self.namespace = namespace

    def prepare(self) -> None:
        """Create the ConfigMap that stand-in workers run."""
        source = (Path(__file__).parent / "stand_in_worker.py").read_text()
        self.api.create("configmap", self.namespace, {"metadata": {"name": SCRIPT}, "data": {"worker.py": source}})

    def manifest(
        self,
        name: str,
        *,
        replicas: int = 1,
        behaviour: Mapping[str, Any] | None = None,
        workers: Mapping[str, Any] | None = None,
        pod: Mapping[str, Any] | None = None,
        accelerator: tuple[str, int] = ("", 0),
        **spec: Any,
    ) -> Manifest:
        """Return a resource whose workers are stand-ins.

        Args:
            name: Name of the resource.
            replicas: ``spec.replicas``.
            behaviour: Behaviour that every worker starts with.
            workers: More fields of ``spec.workers``.
            pod: More fields of the workers' pods.
            accelerator: Extended resource and units that each worker requests; 0 units mean workers on the CPU.
            **spec: More fields of ``spec``.
        """
        resource, count = accelerator
        return {
            "kind": "SpecDecodeDeployment",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": "embedded://smollm2-135m-instruct", "servedName": "stand-in"},
                "engine": {"maxModelLen": 1024, "maxNumSeqs": 4},
                "speculation": {"draft": {"uri": "embedded://none"}},
                "replicas": replicas,
                "drain": {"endpointDelay": "0s", "gracePeriod": "1s"},
                "workers": {
                    "image": self.image,
                    "resources": SMALL,
                    "accelerator": {"count": count, **({"resource": resource} if count else {})},
                    "template": merged(stand_in_template(behaviour or {}), {"spec": pod or {}}),
                    **(workers or {}),
                },
                "router": {"replicas": 0},
                **spec,
            },
        }

    @contextmanager
    def deployment(self, name: str, *, ready: bool = True, **fields: Any) -> Iterator[ServedDeployment]:
        """Yield a deployment of stand-in workers, Ready unless ``ready`` is False; it is deleted afterwards."""
        served = ServedDeployment(self, name)
        self.api.create("sdd", self.namespace, self.manifest(name, **fields))
        try:
            if ready:
                served.wait_running(fields.get("replicas", 1))
            yield served
        finally:
            self.api.delete("sdd", self.namespace, name)
            served.wait_gone()


def stand_in_template(behaviour: Mapping[str, Any]) -> Manifest:
    """Return the overlay of the pod template that runs the stand-in instead of a worker."""
    worker = {
        "name": "worker",
        "command": ["python3", "/stand-in/worker.py"],
        "env": [{"name": "STAND_IN_BEHAVIOUR", "value": json.dumps(dict(behaviour))}],
        "volumeMounts": [{"name": "stand-in", "mountPath": "/stand-in"}],
    }
    return {
        "spec": {
            "volumes": [{"name": "stand-in", "configMap": {"name": SCRIPT}}],
            "initContainers": [{"name": "pull", "command": ["true"]}],
            "containers": [worker],
        }
    }


class ServedDeployment:
    """One SpecDecodeDeployment: its resource, status, children and stand-in workers."""

    def __init__(self, tenant: Tenant, name: str) -> None:
        self.api = tenant.api
        self.tenant = tenant
        self.namespace = tenant.namespace
        self.name = name

    # Resource and status

    def get(self) -> Manifest:
        return self.api.get("sdd", self.namespace, self.name)

    def patch(self, spec: Manifest) -> Manifest:
        return self.api.patch("sdd", self.namespace, self.name, {"spec": spec})

    def mark(self, text: str) -> None:
        """Change the pod template's annotation: the smallest change of a spec that reaches a child."""
        self.patch({"workers": {"template": {"metadata": {"annotations": {LIVE_ANNOTATION: text}}}}})

    def marked(self) -> str:
        """Return the annotation of the child Deployment's pod template."""
        metadata = self.workload()["spec"]["template"]["metadata"]
        return str(metadata.get("annotations", {}).get(LIVE_ANNOTATION, ""))

    def seconds_to_mark(self, text: str, timeout_s: float = 30) -> float:
        """Change the spec and return the time until the child has the change."""
        started = time.monotonic()
        self.mark(text)
        wait_for(f"change {text} is applied", lambda: self.marked() == text, timeout_s=timeout_s, every_s=0.05)
        return time.monotonic() - started

    def conditions(self) -> dict[str, Manifest]:
        status = self.get().get("status", {})
        return {condition["type"]: condition for condition in status.get("conditions", [])}

    def is_named(self, *texts: str) -> bool:
        """Return whether one condition's message contains all texts; a condition's own type counts as text."""
        said = {kind: f"{kind}: {condition['message']}" for kind, condition in self.conditions().items()}
        assert any(all(text.lower() in one.lower() for text in texts) for one in said.values()), said
        return True

    def wait_named(self, *texts: str, timeout_s: float = 30) -> float:
        """Wait until one condition's message contains all texts, and return the seconds that it took."""
        started = time.monotonic()
        wait_for(f"a condition names {texts}", lambda: self.is_named(*texts), timeout_s=timeout_s, every_s=0.2)
        return time.monotonic() - started

    def is_condition(self, kind: str, status: str) -> bool:
        """Return whether a condition has a status, for the present generation."""
        resource = self.get()
        conditions = resource.get("status", {}).get("conditions", [])
        condition = next((c for c in conditions if c["type"] == kind), None)
        assert condition, f"no condition {kind}"
        generation = resource["metadata"]["generation"]
        observed = resource["status"].get("observedGeneration"), condition.get("observedGeneration")
        assert set(observed) == {generation}, f"generation {generation}, observed {observed}: {condition}"
        assert condition["status"] == status, condition
        return True

    # Children

    def workload(self) -> Manifest:
        return self.api.get("deployment", self.namespace, f"{self.name}-worker")

    def child(self, kind: str, suffix: str = "") -> Manifest | None:
        return self.api.find(kind, self.namespace, self.name + suffix)

    def owned_names(self) -> list[str]:
        """Return kind and name of every child that carries this deployment's label."""
        kinds = ("deployment", "service", "configmap", "secret", "pdb")
        labels = f"specdecode.io/name={self.name}"
        return [
            f"{kind}/{item['metadata']['name']}"
            for kind in kinds
            for item in self.api.list(kind, self.namespace, labels)
        ]

    def wait_gone(self) -> None:
        """Wait until the garbage collector has removed children and workers; remove what it leaves behind.

        It leaves the Secret of a deployment that was deleted with orphans: the operator cannot adopt it.
        """

        def is_gone() -> bool:
            return all(child.startswith("secret/") for child in self.owned_names())

        try:
            wait_for(f"children of {self.name} are gone", is_gone, timeout_s=60)
        finally:
            for kind, name in (child.split("/") for child in self.owned_names()):
                self.api.delete(kind, self.namespace, name)
            # After an outage of the API server, the kubelet learns of a deletion more than a minute late.
            wait_for(f"workers of {self.name} are gone", lambda: not self.all_pods(), timeout_s=150)

    # Workers

    def all_pods(self) -> list[Manifest]:
        return self.api.list("pod", self.namespace, f"specdecode.io/name={self.name}")

    def pods(self) -> list[Manifest]:
        """Return the pods that are Ready and not terminating, in the order of their names."""
        return sorted((pod for pod in self.all_pods() if is_ready(pod)), key=lambda pod: str(pod["metadata"]["name"]))

    def wait_running(self, replicas: int) -> None:
        """Wait until this many workers are Ready and status says so."""
        wait_for(
            f"{replicas} workers of {self.name} run", lambda: len(self.pods()) == replicas, timeout_s=START_SECONDS
        )
        if replicas:
            wait_for(f"{self.name} is Ready", lambda: self.is_condition("Ready", "True"), timeout_s=START_SECONDS)

    def restarts(self) -> dict[str, int]:
        """Return the restart count of every Ready pod by name."""
        return {
            pod["metadata"]["name"]: sum(c["restartCount"] for c in pod["status"]["containerStatuses"])
            for pod in self.pods()
        }

    def behave(self, pod: Manifest, **behaviour: Any) -> None:
        url = f"http://{pod['status']['podIP']}:8002/behaviour"
        httpx.put(url, json=behaviour, timeout=10, trust_env=False).raise_for_status()

    def worker_state(self, pod: Manifest) -> Manifest:
        """Return the counts and the plan of one worker."""
        answer = httpx.get(f"http://{pod['status']['podIP']}:8002/state", timeout=10, trust_env=False)
        state: Manifest = answer.raise_for_status().json()
        return state

    def plan_versions(self) -> list[int]:
        """Return the plan version of every Ready worker."""
        return [int(self.worker_state(pod)["plan"]["version"]) for pod in self.pods()]

    def settled_plan_version(self) -> int:
        """Return the plan version of all workers, once they agree and the plan is made for their draft."""

        def agreed() -> int:
            plans = [self.worker_state(pod)["plan"] for pod in self.pods()]
            assert plans
            assert all(plan["draft"] for plan in plans), plans
            (version,) = {int(plan["version"]) for plan in plans}
            return version

        return wait_for("all workers have one plan", agreed, timeout_s=40)
